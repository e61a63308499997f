
"use strict";
(() => {
  const table = document.querySelector("table.runs");
  const body = table.tBodies[0];
  const lines = [...body.rows];
  const tools = document.getElementById("tools");
  const make = (name, text) => {
    const made = document.createElement(name);
    if (text) made.textContent = text;
    return made;
  };
  const status = make("span");
  status.setAttribute("role", "status");

  // The sort key of a cell: a number, a text, or null, which is last in both directions.
  const keyOf = (cell) => {
    const text = cell.dataset.v ?? cell.textContent.trim();
    if (text === "-" || text === "") return null;
    const figure = Number(text);
    return Number.isNaN(figure) ? text.toLowerCase() : figure;
  };
  const compared = (a, b) => {
    if (typeof a === "number" && typeof b === "number") return a - b;
    if (typeof a === typeof b) return a < b ? -1 : a > b ? 1 : 0;
    return typeof a === "number" ? -1 : 1;
  };
  const headings = [...table.tHead.rows[0].cells];
  const sortBy = (at, way) => {
    headings.forEach((heading, other) => heading.setAttribute("aria-sort", other === at ? way : "none"));
    let order = lines;
    if (way !== "none") {
      const turn = way === "ascending" ? 1 : -1;
      const keyed = lines.map((line) => [keyOf(line.cells[at]), line]);
      keyed.sort(([a], [b]) => (a === null ? (b === null ? 0 : 1) : b === null ? -1 : turn * compared(a, b)));
      order = keyed.map(([, line]) => line);
    }
    body.append(...order);
    const name = headings[at].textContent;
    status.textContent = way === "none" ? "In the order read" : `Sorted by ${name}, ${way}`;
  };
  const next = { none: "ascending", ascending: "descending", descending: "none" };
  headings.forEach((heading, at) => {
    const button = make("button", heading.textContent);
    button.type = "button";
    heading.replaceChildren(button);
    heading.setAttribute("aria-sort", "none");
    button.addEventListener("click", () => sortBy(at, next[heading.getAttribute("aria-sort")]));
  });

  const label = make("label", "Show runs with ");
  const input = make("input");
  input.type = "search";
  input.placeholder = "name, layout, ended …";
  label.append(input);
  const texts = lines.map((line) => line.textContent.toLowerCase());
  input.addEventListener("input", () => {
    const words = input.value.toLowerCase().split(/\s+/).filter(Boolean);
    let shown = 0;
    lines.forEach((line, at) => {
      line.hidden = !words.every((word) => texts[at].includes(word));
      shown += line.hidden ? 0 : 1;
    });
    status.textContent = words.length ? `${shown} of ${lines.length} runs` : "";
  });
  const all = [...document.querySelectorAll("details.run")];
  const toggle = make("button", "Open all details");
  toggle.type = "button";
  toggle.addEventListener("click", () => {
    const open = all.some((one) => !one.open);
    all.forEach((one) => (one.open = open));
    toggle.textContent = open ? "Close all details" : "Open all details";
  });
  tools.append(...(lines.length > 1 ? [label] : []), status);
  tools.hidden = false;
  const unfold = document.getElementById("unfold");
  unfold.append(toggle);
  unfold.hidden = all.length < 2;

  // A link to a run opens its details and scrolls to them.
  const reveal = () => {
    const found = document.getElementById(location.hash.slice(1));
    const holder = found && found.closest("details");
    if (!holder) return;
    for (let one = holder; one; one = one.parentElement.closest("details")) one.open = true;
    holder.querySelector("summary").focus({ preventScroll: true });
    holder.scrollIntoView();
  };
  addEventListener("hashchange", reveal);
  document.addEventListener("click", (event) => {
    const link = event.target.closest && event.target.closest("a[href^='#run-']");
    if (link && link.hash === location.hash) reveal();
  });
  reveal();

  // The curves: which runs, over steps, tokens or hours, with their figures under the pointer or by the arrow keys.
  const chosen = [...document.querySelectorAll("#choices input")];
  const [WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM, STYLES] = [560, 290, 52, 548, 24, 248, 8];
  const AXES = [["step", "Steps"], ["tokens", "Tokens"], ["hours", "Hours of steps"]];
  const KINDS = [["loss", "Loss", "loss"], ["time", "Step time", "seconds a step"]];
  const drawn = (name, attributes, text) => {
    const made = document.createElementNS("http://www.w3.org/2000/svg", name);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    if (text !== undefined) made.textContent = text;
    return made;
  };
  const digits = (figure) => {
    if (figure === 0) return "0";
    for (const [unit, letter] of [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e4, "k"]]) {
      const of = letter === "k" ? 1e3 : unit;
      if (Math.abs(figure) >= unit) return `${Number((figure / of).toPrecision(4))}${letter}`;
    }
    return `${Number(figure.toPrecision(4))}`;
  };
  const summed = (text) => {
    let sum = 0;
    return text ? text.split(",").map((step) => (sum += Number(step))) : [];
  };
  const parsed = (text) => {
    const [steps, figures, seconds] = (text || ";;").split(";");
    const y = figures.split(",").map((one) => (one === "" ? NaN : Number(one)));
    return { step: summed(steps), hours: summed(seconds).map((one) => one / 3600), y };
  };
  const runs = chosen.map((box) => ({
    box, label: box.nextElementSibling.textContent, tokens: Number(box.dataset.tokens || NaN),
    loss: parsed(box.dataset.loss), time: parsed(box.dataset.time),
  }));
  const acrossOf = (run, kind, axis) =>
    axis === "tokens" ? (run.tokens ? run[kind].step.map((step) => step * run.tokens) : []) : run[kind][axis];
  // Figures drawn from `start` to `stop`: where, which one is there, and round ones for the ticks.
  const scaled = (values, start, stop, log, whole) => {
    let low = Infinity, high = -Infinity;
    for (const one of values) if (Number.isFinite(one)) { low = Math.min(low, one); high = Math.max(high, one); }
    if (low > high) [low, high] = [0, 1];
    log = log && low > 0 && high > low;
    const room = log ? (high / low) ** 0.02 : (high - low) * 0.03 || Math.abs(high) * 0.1 || 1;
    [low, high] = log ? [low / room, high * room] : [low >= 0 ? Math.max(0, low - room) : low - room, high + room];
    const [a, b] = log ? [Math.log10(low), Math.log10(high)] : [low, high];
    const ticks = [];
    if (log) {
      const decades = Math.ceil(b) - Math.floor(a);
      for (let power = Math.floor(a); power <= b; power += Math.max(1, Math.ceil(decades / 6)))
        for (const digit of decades <= 2 ? [1, 2, 5] : [1]) ticks.push(digit * 10 ** power);
    } else {
      const least = Math.max((high - low) / 5, whole ? 1 : 0), power = 10 ** Math.floor(Math.log10(least));
      const step = [1, 2, 5, 10].map((digit) => digit * power).find((one) => one >= least * 0.999);
      for (let at = Math.ceil(low / step); at * step <= high; at++) ticks.push(at * step);
    }
    const at = (one) => start + (((log ? Math.log10(one) : one) - a) / (b - a)) * (stop - start);
    return { at, log, ticks: ticks.filter((one) => one >= low && one <= high) };
  };
  const plots = [];
  const redraw = (axis, logs) => {
    const shown = runs.filter((run) => run.box.checked);
    shown.forEach((run, place) => (run.style = place % STYLES));
    for (const plot of plots) plot.draw(shown, axis, logs);
  };
  const swatch = (style) => {
    const made = drawn("svg", { width: 24, height: 14, viewBox: "0 0 24 14", class: "swatch", "aria-hidden": "true" });
    made.append(drawn("path", { d: "M1 7h22", class: `line s${style}` }));
    return made;
  };
  const plotOf = ([kind, title, unit]) => {
    const figure = make("figure"), plot = make("div"), caption = make("figcaption"), read = make("ul");
    plot.className = "plot";
    plot.tabIndex = 0;
    plot.setAttribute("role", "slider");
    read.className = "legend read";
    caption.append(read);
    figure.append(plot, caption);
    let svg, marks, lines = [], stops = [], at = 0, name = "";
    const show = (index) => {
      at = Math.max(0, Math.min(stops.length - 1, index));
      const x = stops[at];
      const said = [];
      marks.replaceChildren(drawn("path", { d: `M${svg.x.at(x)} ${TOP}V${BOTTOM}`, class: "guide" }));
      for (const line of lines) {
        let near = 0;
        line.x.forEach((one, place) => {
          if (Math.abs(one - x) < Math.abs(line.x[near] - x)) near = place;
        });
        const inside = x >= line.low && x <= line.high;
        const y = inside ? line.y[near] : NaN;
        if (Number.isFinite(y))
          marks.append(drawn("circle", { cx: svg.x.at(line.x[near]), cy: svg.y.at(y), r: 3.5, class: `dot s${line.run.style}` }));
        line.value.textContent = inside ? (Number.isFinite(y) ? digits(y) : "no figure") : "-";
        if (inside) said.push(`${line.run.label} ${line.value.textContent}`);
      }
      const where = `${name} ${digits(x)}`;
      read.firstChild.textContent = where;
      plot.setAttribute("aria-valuenow", at);
      plot.setAttribute("aria-valuetext", `${where}: ${said.join("; ")}`);
    };
    const draw = (shown, axis, logs) => {
      name = axis === "step" ? "step" : axis;
      lines = shown.map((run) => ({ run, x: acrossOf(run, kind, axis), y: run[kind].y, value: make("strong") }));
      lines = lines.filter((line) => line.x.length && line.y.some(Number.isFinite));
      for (const line of lines) [line.low, line.high] = [Math.min(...line.x), Math.max(...line.x)];
      stops = [...new Set(lines.flatMap((line) => line.x))].sort((a, b) => a - b);
      const all = lines.flatMap((line) => line.y).filter((one) => Number.isFinite(one));
      const spread = all.length && Math.min(...all) > 0 ? Math.max(...all) / Math.min(...all) : 1;
      const x = scaled(stops, LEFT, RIGHT, logs, axis === "step"), y = scaled(all, BOTTOM, TOP, spread >= 30);
      const frame = drawn("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, "aria-hidden": "true" });
      for (const one of y.ticks) {
        frame.append(drawn("path", { d: `M${LEFT} ${y.at(one)}H${RIGHT}`, class: "grid" }));
        frame.append(drawn("text", { x: LEFT - 5, y: y.at(one) + 3.5, "text-anchor": "end" }, digits(one)));
      }
      for (const one of x.ticks) {
        frame.append(drawn("path", { d: `M${x.at(one)} ${BOTTOM}v4`, class: "tick" }));
        frame.append(drawn("text", { x: x.at(one), y: BOTTOM + 17, "text-anchor": "middle" }, digits(one)));
      }
      frame.append(drawn("path", { d: `M${LEFT} ${TOP}V${BOTTOM}H${RIGHT}`, class: "axis" }));
      frame.append(drawn("text", { x: 4, y: 12, class: "unit" }, unit + (y.log ? ", log scale" : "")));
      const below = (axis === "hours" ? "hours of steps" : axis) + (x.log ? ", log scale" : "");
      frame.append(drawn("text", { x: RIGHT, y: HEIGHT - 6, "text-anchor": "end", class: "unit" }, below));
      for (const line of lines) {
        let path = "", last = NaN;
        line.x.forEach((one, place) => {
          const up = line.y[place];
          // A line is broken at a missing figure, and where a later attempt goes back.
          const on = Number.isFinite(up) && one > last;
          if (Number.isFinite(up) && !(x.log && one <= 0)) path += `${on && path ? "L" : "M"}${x.at(one).toFixed(1)} ${y.at(up).toFixed(1)}`;
          last = Number.isFinite(up) ? one : NaN;
        });
        frame.append(drawn("path", { d: path + "h0", class: `line s${line.run.style}` }));
      }
      marks = drawn("g", {});
      frame.append(marks);
      svg = { x, y };
      plot.replaceChildren(frame);
      const items = lines.map((line) => {
        const item = make("li");
        item.append(swatch(line.run.style), ` ${line.run.label} `, line.value);
        return item;
      });
      const over = AXES.find(([key]) => key === axis)[1].toLowerCase();
      const label = `${title} over ${over} of ${lines.length} run${lines.length === 1 ? "" : "s"}`;
      read.replaceChildren(make("li", label), ...items);
      plot.setAttribute("aria-label", label);
      plot.setAttribute("aria-valuemin", 0);
      plot.setAttribute("aria-valuemax", Math.max(0, stops.length - 1));
      plot.setAttribute("aria-valuenow", 0);
      plot.setAttribute("aria-valuetext", "the arrow keys read the figures");
      figure.hidden = !lines.length;
    };
    plot.addEventListener("pointermove", (event) => {
      const box = plot.getBoundingClientRect();
      const over = ((event.clientX - box.x) / box.width) * WIDTH;
      let near = 0;
      stops.forEach((one, place) => {
        if (Math.abs(svg.x.at(one) - over) < Math.abs(svg.x.at(stops[near]) - over)) near = place;
      });
      if (stops.length) show(near);
    });
    plot.addEventListener("keydown", (event) => {
      const many = Math.max(1, Math.round(stops.length / 10));
      const moves = {
        ArrowRight: at + 1, ArrowUp: at + 1, ArrowLeft: at - 1, ArrowDown: at - 1,
        PageUp: at + many, PageDown: at - many, Home: 0, End: stops.length - 1,
      };
      if (!(event.key in moves) || !stops.length) return;
      event.preventDefault();
      show(moves[event.key]);
    });
    return { figure, draw };
  };
  if (chosen.length) {
    const choice = document.getElementById("choice");
    const lengths = runs.filter((run) => run.box.checked).map((run) => Math.max(...run.loss.step, ...run.time.step));
    const logs = make("input");
    logs.type = "checkbox";
    logs.checked = lengths.length > 1 && Math.max(...lengths) >= 10 * Math.min(...lengths);
    const radios = AXES.map(([key, words], place) => {
      const radio = make("input"), label = make("label");
      radio.type = "radio";
      radio.name = "over";
      radio.value = key;
      radio.checked = !place;
      radio.disabled = !runs.some((run) => KINDS.some(([kind]) => acrossOf(run, kind, key).length));
      label.append(radio, words);
      return { radio, label };
    });
    const again = () => redraw(radios.find(({ radio }) => radio.checked).radio.value, logs.checked);
    const logLabel = make("label");
    logLabel.append(logs, "log scale");
    const group = make("div");
    group.setAttribute("role", "radiogroup");
    group.setAttribute("aria-label", "Curves over");
    group.append(...radios.map(({ label }) => label));
    const buttons = [["All runs", true], ["No runs", false]].map(([words, on]) => {
      const button = make("button", words);
      button.type = "button";
      button.addEventListener("click", () => {
        chosen.forEach((box) => (box.checked = on));
        again();
      });
      return button;
    });
    choice.append(group, logLabel, ...(chosen.length > 1 ? buttons : []));
    choice.hidden = document.getElementById("choices").hidden = false;
    for (const box of [...chosen, logs, ...radios.map(({ radio }) => radio)]) box.addEventListener("change", again);
    plots.push(...KINDS.map(plotOf));
    document.getElementById("drawn").replaceChildren(...plots.map((plot) => plot.figure));
    again();
  }

  let closed = [];
  addEventListener("beforeprint", () => {
    closed = [...document.querySelectorAll("details:not([open])")];
    closed.forEach((one) => (one.open = true));
  });
  addEventListener("afterprint", () => closed.forEach((one) => (one.open = false)));
})();
