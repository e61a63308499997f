
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

  // The curves. `data` has the points of every run, thinned: see hpc_gpt/report/page/curves.py.
  const data = JSON.parse(document.getElementById("data").textContent);
  const KINDS = [
    ["loss", "Loss", "loss"], ["step_s", "Step time", "seconds a step"],
    ["rate", `Tokens/s per ${data.per}`, `tokens/s of one ${data.per}`], ["memory", "Memory", "GiB of a GPU"],
  ];
  const AXES = [["step", "steps"], ["tokens", "tokens"], ["hours", "hours of steps"]];
  const [STYLES, SMOOTH_FROM, NAMED, LOG_FROM] = [8, 40, 8, 30];

  const drawn = (name, attributes, text) => {
    const made = document.createElementNS("http://www.w3.org/2000/svg", name);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    if (text !== undefined) made.textContent = text;
    return made;
  };
  const digits = (figure) => {
    if (figure === 0) return "0";
    for (const [least, unit, letter] of [[1e12, 1e12, "T"], [1e9, 1e9, "G"], [1e6, 1e6, "M"], [1e4, 1e3, "k"]])
      if (Math.abs(figure) >= least) return `${Number((figure / unit).toPrecision(4))}${letter}`;
    return `${Number(figure.toPrecision(4))}`;
  };

  // Each run's arrays: `x` by axis, `y` by kind of figure, NaN for what is not known.
  const summed = (differences) => {
    let sum = 0;
    return (differences || []).map((one) => (sum += one));
  };
  const curves = data.runs.map((run, index) => {
    const figures = (key) => (run[key] || []).map((one) => one ?? NaN);
    const step = summed(run.step), rate = run.tokens && run.gpus && run.tokens / run.gpus;
    return {
      ...run, index, style: index % STYLES,
      x: {
        step, tokens: run.tokens ? step.map((one) => one * run.tokens) : [],
        hours: summed(run.seconds).map((one) => one / 3600),
      },
      y: {
        loss: figures("loss"), step_s: figures("step_s"), memory: figures("memory"),
        rate: run.rate ? figures("rate") : rate ? figures("step_s").map((one) => rate / one) : [],
      },
      starts: run.starts || [], evals: run.evals || [[], []], skipped: run.skipped || [], nan: run.nan || [],
      last: run.last || {}, varied: run.varied || {},
    };
  });
  // A line of a chart. Over a swept setting each run is one point: its last figure.
  const lineOf = (run, kind, axis, name = run.name) => {
    if (!(axis in run.x)) return { run, name, x: [run.varied[axis] ?? NaN], y: [run.last[kind] ?? NaN], lone: true };
    return { run, name, x: run.x[axis], y: run.y[kind] };
  };
  const known = (line) => line.x.length > 0 && line.y.some((one, at) => Number.isFinite(one) && Number.isFinite(line.x[at]));
  // The place of a run's step on the axis.
  const placeOf = (line, step) => {
    const at = line.run.x.step.findIndex((one) => one >= step);
    return line.x[at < 0 ? line.x.length - 1 : at];
  };
  // The mean of each point and its neighbours, within an attempt; unchanged if there are few points.
  const smoothed = ({ run, y }) => {
    const half = Math.round(y.length / 80);
    if (y.length < SMOOTH_FROM || !half) return null;
    const edges = [0, ...run.starts.map(([at]) => at), y.length];
    return y.map((own, at) => {
      if (!Number.isFinite(own)) return NaN;
      const from = Math.max(at - half, edges.findLast((edge) => edge <= at));
      const near = y.slice(from, Math.min(at + half + 1, edges.find((edge) => edge > at))).filter(Number.isFinite);
      return near.reduce((sum, one) => sum + one, 0) / near.length;
    });
  };
  // The scale of figures drawn from `start` to `stop`: the place of a figure, and ticks at 1, 2 and 5 times powers of ten.
  const scaled = (values, start, stop, log, whole) => {
    let low = Infinity, high = -Infinity;
    for (const one of values) if (Number.isFinite(one) && !(log && one <= 0)) { low = Math.min(low, one); high = Math.max(high, one); }
    if (low > high) [low, high] = [1, 2];
    const room = log ? (high / low) ** 0.03 || 1 : (high - low) * 0.03 || Math.abs(high) * 0.1 || 1;
    if (log) [low, high] = low === high ? [low / 2, high * 2] : [low / room, high * room];
    else [low, high] = [low >= 0 ? Math.max(0, low - room) : low - room, high + room];
    const turned = log ? Math.log10 : (one) => one;
    const [a, b] = [turned(low), turned(high)], ticks = [];
    if (log && b - a > 1) {
      for (let power = Math.floor(a); power <= b; power += Math.max(1, Math.ceil((b - a) / 6)))
        for (const digit of b - a <= 3 ? [1, 2, 5] : [1]) ticks.push(digit * 10 ** power);
    } else {
      const least = Math.max((high - low) / 5, whole ? 1 : 0), power = 10 ** Math.floor(Math.log10(least));
      const step = [1, 2, 5, 10].map((digit) => digit * power).find((one) => one >= least * 0.999);
      for (let at = Math.ceil(low / step); at * step <= high; at++) ticks.push(at * step);
    }
    const at = (one) => start + ((turned(Math.min(Math.max(one, low), high)) - a) / (b - a)) * (stop - start);
    return { at, ticks: ticks.filter((one) => one >= low && one <= high) };
  };
  const pathOf = (line, y, x, up) => {
    let path = "", last = NaN;
    line.x.forEach((one, at) => {
      const inside = Number.isFinite(y[at]) && Number.isFinite(one);
      // A line is broken at a missing figure, and where a later attempt goes back.
      if (inside) path += `${one > last ? "L" : "M"}${x.at(one).toFixed(1)} ${up.at(y[at]).toFixed(1)}`;
      last = inside ? one : NaN;
    });
    return `${path}h0`;
  };
  // A chart in `holder`; `read(at, values, note)` gets the figures under the pointer: [line, text] per line.
  const plotOf = (holder, height, read) => {
    const plot = make("div");
    plot.className = "plot";
    plot.tabIndex = 0;
    plot.setAttribute("role", "slider");
    holder.append(plot);
    let of = null, scales, marks, stops = [], at = 0;
    const show = (index) => {
      at = Math.max(0, Math.min(stops.length - 1, index));
      const x = stops[at], values = [], notes = [];
      marks.replaceChildren(drawn("path", { d: `M${scales.x.at(x).toFixed(1)} ${scales.top}V${scales.bottom}`, class: "guide" }));
      for (const line of of.lines) {
        let near = 0;
        line.x.forEach((one, place) => {
          if (Math.abs(one - x) < Math.abs(line.x[near] - x)) near = place;
        });
        const inside = line.lone ? line.x[0] === x : x >= line.low && x <= line.high;
        const y = inside ? line.y[near] : NaN;
        if (Number.isFinite(y)) {
          const spot = { cx: scales.x.at(line.x[near]), cy: scales.y.at(y), r: 3.5, class: `dot s${line.run.style}` };
          marks.append(drawn("circle", spot));
        }
        values.push([line, inside ? (Number.isFinite(y) ? digits(y) : "no figure") : "-"]);
        for (const [start, text] of line.run.starts)
          if (!line.lone && Math.abs(scales.x.at(line.x[start]) - scales.x.at(x)) < 4) notes.push(`${line.name}: ${text}`);
      }
      const where = `${of.axis} ${digits(x)}`, note = notes.join("; ");
      const said = values.filter(([, text]) => text !== "-").map(([line, text]) => `${line.name} ${text}`);
      plot.setAttribute("aria-valuenow", at);
      plot.setAttribute("aria-valuetext", `${where}: ${said.join("; ")}${note && `; ${note}`}`);
      read(where, values, note, said);
    };
    const frame = (width, right) => {
      const box = drawn("svg", { viewBox: `0 0 ${width} ${height}`, "aria-hidden": "true" });
      const [left, top, bottom] = [52, 22, height - 36];
      const all = of.lines.flatMap((line) => [...line.y, ...(of.kind === "loss" && !line.lone ? line.run.evals[1] : [])]);
      const x = scaled(of.lines.flatMap((line) => line.x), left, right, of.logX, of.axis === "step");
      const y = scaled(all, bottom, top, of.logY);
      scales = { x, y, top, bottom, left };
      for (const one of y.ticks) {
        box.append(drawn("path", { d: `M${left} ${y.at(one)}H${right}`, class: "grid" }));
        box.append(drawn("text", { x: left - 6, y: y.at(one) + 4, "text-anchor": "end" }, digits(one)));
      }
      let free = -Infinity;
      for (const one of x.ticks) {
        const text = digits(one), place = x.at(one);
        box.append(drawn("path", { d: `M${place} ${bottom}v4`, class: "tick" }));
        if (place - 4 * text.length < free) continue;
        box.append(drawn("text", { x: place, y: bottom + 16, "text-anchor": "middle" }, text));
        free = place + 4 * text.length + 8;
      }
      box.append(drawn("path", { d: `M${left} ${top}V${bottom}H${right}`, class: "axis" }));
      box.append(drawn("text", { x: 2, y: 11, class: "unit" }, of.unit + (of.logY ? ", log scale" : "")));
      const name = (AXES.find(([key]) => key === of.axis) || [0, of.axis])[1];
      const below = { x: right, y: height - 4, "text-anchor": "end", class: "unit" };
      box.append(drawn("text", below, (of.axis === "step" ? "step" : name) + (of.logX ? ", log scale" : "")));
      return box;
    };
    const addMarks = (box, line) => {
      const { x, y, top, bottom } = scales, run = line.run, labels = [];
      for (const [start, text] of run.starts) {
        const up = line.y.slice(start).find(Number.isFinite);
        if (up === undefined) continue;
        const tick = drawn("path", { d: `M${x.at(line.x[start]).toFixed(1)} ${(y.at(up) - 9).toFixed(1)}v18`, class: `restart s${run.style}` });
        tick.append(drawn("title", {}, `${line.name}: ${text}`));
        box.append(tick);
        if (of.lines.length > 1 || run.starts.length > 4) continue;
        const [short] = text.split(":"), at = x.at(line.x[start]), end = at > (52 + x.at(line.high)) / 2, wide = 6.5 * short.length;
        const from = end ? at - wide : at;
        let place = Math.max(y.at(up) - 12, top + 10);
        while (labels.some(([left, right, line]) => from < right && from + wide > left && Math.abs(place - line) < 12)) place += 12;
        labels.push([from, from + wide, place]);
        box.append(drawn("text", { x: at + (end ? -4 : 4), y: place, "text-anchor": end ? "end" : "start" }, short));
      }
      if (of.kind !== "loss") return;
      run.evals[0].forEach((step, place) => {
        const spot = { cx: x.at(placeOf(line, step)), cy: y.at(run.evals[1][place]), r: 2.8, class: `point s${run.style}` };
        box.append(drawn("circle", spot));
      });
      if (of.lines.length > 1) return;
      for (const step of run.skipped) box.append(drawn("path", { d: `M${x.at(placeOf(line, step))} ${bottom - 8}v8`, class: "skipped" }));
      for (const step of run.nan) box.append(drawn("path", { d: `M${x.at(placeOf(line, step)) - 3} ${top + 1}l6 6m0-6l-6 6`, class: "nan" }));
    };
    const shortened = (name) => (name.length > 17 ? `…${name.slice(-16)}` : name);
    // Names are at the right, except where a line ends so early that its name has room behind it.
    const addNames = (box, right) => {
      const all = of.lines.map((line) => {
        const last = line.y.findLastIndex(Number.isFinite);
        return [scales.y.at(line.y[last]), line, scales.x.at(line.x[last]) + 6];
      }).sort((a, b) => a[0] - b[0]);
      const isEarly = ([, line, at]) => at + 6.5 * shortened(line.name).length <= right - 6;
      const named = (line, x, y, more) => box.append(drawn("text", { x, y: y + 4, class: `name s${line.run.style}${more}`, "data-run": line.run.index }, shortened(line.name)));
      const taken = [];
      for (const [up, line, at] of all.filter(isEarly)) {
        const isFree = (y) => !taken.some(([left, other]) => Math.abs(left - at) < 116 && Math.abs(other - y) < 11);
        const places = [0, -1, 1, -2, 2, -3, 3].map((by) => up + 13 * by).filter((y) => y < scales.bottom - 6 && y > scales.top);
        const place = places.find(isFree) ?? up;
        taken.push([at, place]);
        named(line, at, place, " early");
      }
      const ends = all.filter((end) => !isEarly(end));
      let free = scales.top + 4;
      ends.forEach((end) => {
        end[0] = Math.max(end[0], free);
        free = end[0] + 13;
      });
      ends.reverse().forEach((end, below) => {
        end[0] = Math.min(end[0], scales.bottom - 13 * below);
        named(end[1], right + 6, end[0], "");
      });
    };
    // The names of points, as many as there is room for.
    const addSpotNames = (box, right) => {
      const taken = of.lines.map((line) => [scales.x.at(line.x[0]) - 6, scales.x.at(line.x[0]) + 6, scales.y.at(line.y[0])]);
      for (const { x, y, name, run } of of.lines) {
        const wide = 6.2 * name.length, at = scales.x.at(x[0]), up = scales.y.at(y[0]);
        const free = ([from, to]) => from >= 52 && to <= right && !taken.some(([left, stop, line]) => from < stop && to > left && Math.abs(up - line) < 11);
        const place = [[at + 9, at + 9 + wide, "start"], [at - 9 - wide, at - 9, "end"]].find(free);
        if (!place) continue;
        taken.push([...place.slice(0, 2), up]);
        const text = { x: place[2] === "end" ? place[1] : place[0], y: up + 4, "text-anchor": place[2], "data-run": run.index };
        box.append(drawn("text", { ...text, class: `name s${run.style}` }, name));
      }
    };
    const redraw = () => {
      if (!of) return;
      const width = Math.max(220, Math.round(plot.clientWidth || 560));
      const named = of.lines.length > 1 && of.lines.length <= NAMED && width >= 480 && !of.lines[0].lone;
      const right = width - (named ? 124 : 12), box = frame(width, right);
      for (const line of of.lines) {
        const smooth = line.lone ? null : smoothed(line), style = `s${line.run.style}`;
        const own = drawn("g", { "data-run": line.run.index });
        box.append(own);
        if (line.lone) {
          own.append(drawn("circle", { cx: scales.x.at(line.x[0]), cy: scales.y.at(line.y[0]), r: 4.5, class: `spot ${style}` }));
          continue;
        }
        own.append(drawn("path", { d: pathOf(line, line.y, scales.x, scales.y), class: `line ${style}${smooth ? " raw" : ""}` }));
        if (smooth) own.append(drawn("path", { d: pathOf(line, smooth, scales.x, scales.y), class: `line ${style}` }));
        addMarks(own, line);
      }
      if (named) addNames(box, right);
      if (of.lines[0]?.lone) addSpotNames(box, right);
      marks = drawn("g", {});
      box.append(marks);
      plot.replaceChildren(box);
    };
    const draw = (next) => {
      of = next;
      for (const line of of.lines) {
        line.low = Infinity, line.high = -Infinity;
        for (const one of line.x) { line.low = Math.min(line.low, one); line.high = Math.max(line.high, one); }
      }
      stops = [...new Set(of.lines.flatMap((line) => line.x))].filter(Number.isFinite).sort((a, b) => a - b);
      const over = (AXES.find(([key]) => key === of.axis) || [0, of.axis])[1];
      const label = `${of.title} over ${over}${of.lines.length === 1 ? `, ${of.lines[0].name}` : ` of ${of.lines.length} runs`}`;
      const about = { label, valuemin: 0, valuemax: Math.max(0, stops.length - 1), valuenow: 0, valuetext: "the arrow keys read the figures" };
      for (const [key, value] of Object.entries(about)) plot.setAttribute(`aria-${key}`, value);
      redraw();
      return label;
    };
    let width = 0;
    new ResizeObserver(() => {
      if (plot.clientWidth && Math.abs(plot.clientWidth - width) > 1) {
        width = plot.clientWidth;
        redraw();
      }
    }).observe(plot);
    plot.addEventListener("pointermove", (event) => {
      const box = plot.getBoundingClientRect();
      let near = 0;
      stops.forEach((one, place) => {
        const away = (stop) => Math.abs(scales.x.at(stop) - (event.clientX - box.x));
        if (away(one) < away(stops[near])) near = place;
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
    return draw;
  };
  // The ratio of the greatest to the least of the figures above zero.
  const ratioOf = (figures) => {
    let low = Infinity, high = -Infinity;
    for (const one of figures) if (one > 0) { low = Math.min(low, one); high = Math.max(high, one); }
    return high / low;
  };
  const spreads = (lines) => ratioOf(lines.flatMap((line) => line.y));
  const chosen = (name, options) => {
    const label = make("label", name === "over" ? "over " : ""), select = make("select");
    select.setAttribute("aria-label", name);
    select.append(...options.map(([value, text]) => {
      const option = make("option", text);
      option.value = value;
      return option;
    }));
    label.append(select);
    return { label, select };
  };
  const ticked = (name) => {
    const label = make("label"), box = make("input");
    box.type = "checkbox";
    label.append(box, ` ${name}`);
    return { label, box };
  };

  // The chart at the top: the group of runs, the figure, the axis, and which runs are drawn.
  const chart = document.getElementById("chart");
  if (chart && curves.length) {
    const [group, kind, axis] = [["Runs", data.groups.map(({ title }, at) => [at, title])], ["Figure", []], ["over", []]]
      .map(([name, options]) => chosen(name, options));
    const [logX, logY] = [ticked("log x"), ticked("log y")], tools = make("div"), list = make("ul"), caption = make("figcaption");
    const where = make("p"), plots = make("div"), side = make("div");
    const shown = new Set();
    side.className = "side";
    plots.className = "plots";
    tools.id = "choice";
    list.id = "choices";
    where.className = "read";
    const fill = (select, options) => {
      const before = select.value;
      select.replaceChildren(...chosen("", options).select.childNodes);
      select.value = (options.find(([value]) => value === before) || options[0])[0];
    };
    const members = () => data.groups[group.select.value].runs.map((at) => curves[at]);
    const value = new Map();
    const linesOver = (over, every) => {
      // A run of a sweep is named by its row.
      const { rows } = data.groups[group.select.value];
      const lines = members().map((run, at) => lineOf(run, kind.select.value, over, rows[at]));
      return lines.filter((line) => (every || shown.has(line.run.index)) && known(line));
    };
    const again = (event) => {
      const of = linesOver(axis.select.value), [, title, unit] = KINDS.find(([key]) => key === kind.select.value);
      // A new choice begins with a linear axis, unless that would show only the greatest figures.
      const changed = event ? event.target : group.select;
      if ([kind.select, group.select].includes(changed)) logY.box.checked = kind.select.value !== "loss" && spreads(of) >= LOG_FROM;
      if ([axis.select, group.select].includes(changed))
        logX.box.checked = of.some((line) => line.lone) && ratioOf(of.flatMap((line) => line.x)) >= LOG_FROM;
      for (const one of value.values()) one.textContent = "";
      const looks = { lines: of, title, unit, kind: kind.select.value, axis: axis.select.value, logX: logX.box.checked, logY: logY.box.checked };
      where.textContent = draw(looks);
      // Beside a sweep's curves: the last figure of every run, not only of the few chosen first, over the varied key.
      const swept = data.groups[group.select.value].varied.find((key) => members().some((run) => key in run.varied));
      const over = swept && AXES.some(([key]) => key === axis.select.value) ? linesOver(swept, members().length > STYLES) : [];
      side.hidden = over.length < 2;
      if (!side.hidden)
        drawSide({ ...looks, lines: over, title: `Last ${title.toLowerCase()}`, unit: `last ${unit}`, axis: swept, logX: ratioOf(over.flatMap((line) => line.x)) >= LOG_FROM });
    };
    const regroup = (event) => {
      const runs = members(), { models, varied, rows } = data.groups[group.select.value];
      const curved = runs.some((run) => run.x.step.length);
      // Rates of different models are not compared. In a sweep without curves each run is a point.
      const has = (key) => (run) => (curved ? run.y[key].some(Number.isFinite) : key in run.last);
      fill(kind.select, KINDS.filter(([key]) => (key !== "rate" || models < 2) && runs.some(has(key))));
      if (!curved && [...kind.select.options].some((one) => one.value === "rate")) kind.select.value = "rate";
      const swept = varied.filter((key) => runs.some((run) => key in run.varied));
      fill(axis.select, [...AXES.filter(([key]) => runs.some((run) => run.x[key].length)), ...swept.map((key) => [key, key])]);
      shown.clear();
      value.clear();
      (curved ? runs.slice(-STYLES) : runs).forEach((run) => shown.add(run.index));
      runs.forEach((run, at) => (run.style = (runs.length - 1 - at) % STYLES));
      list.replaceChildren(...runs.map((run, at) => {
        const item = make("li"), { label, box } = ticked(""), swatch = drawn("svg", { width: 24, height: 14, viewBox: "0 0 24 14", class: "swatch", "aria-hidden": "true" });
        swatch.append(drawn("path", { d: "M1 7h22", class: `line s${run.style}` }));
        box.checked = shown.has(run.index);
        box.addEventListener("change", (changed) => {
          if (box.checked) shown.add(run.index);
          else shown.delete(run.index);
          again(changed);
        });
        value.set(run.index, make("strong"));
        label.append(swatch, make("span", rows[at] || run.name), value.get(run.index));
        label.title = run.name;
        for (const [kind, only] of [["pointerenter", run.index], ["focusin", run.index], ["pointerleave"], ["focusout"]])
          label.addEventListener(kind, () => {
            for (const one of plots.querySelectorAll("[data-run]"))
              one.classList.toggle("faded", only !== undefined && shown.has(only) && one.dataset.run !== `${only}`);
          });
        item.append(label);
        return item;
      }));
      again(event);
    };
    const buttons = [["all", true], ["none", false]].map(([text, on]) => {
      const button = make("button", text);
      button.type = "button";
      button.setAttribute("aria-label", `${text} of the runs`);
      button.addEventListener("click", (event) => {
        for (const run of members()) if (on) shown.add(run.index); else shown.delete(run.index);
        for (const box of list.querySelectorAll("input")) box.checked = on;
        again(event);
      });
      return button;
    });
    tools.append(...(data.groups.length > 1 ? [group.label] : []), kind.label, axis.label, logX.label, logY.label);
    plots.append(make("div"), side);
    chart.replaceChildren(tools, plots);
    const drawSide = plotOf(side, 330, (at, values, note, said) => (where.textContent = `${at}: ${said.join("; ")}`));
    const draw = plotOf(plots.firstChild, 330, (at, values, note) => {
      for (const [line, text] of values) value.get(line.run.index).textContent = ` ${text}`;
      where.textContent = note ? `${at} · ${note}` : at;
    });
    const below = make("div");
    below.className = "below";
    below.append(where, ...(curves.length > 1 ? buttons : []));
    caption.append(below, list);
    chart.append(caption);
    group.select.addEventListener("change", regroup);
    for (const one of [kind.select, axis.select, logX.box, logY.box]) one.addEventListener("change", again);
    regroup();
    const others = document.getElementById("curves");
    if (others) others.hidden = true;
    for (const link of document.querySelectorAll("a[href='#curves']")) link.hash = "#chart";
  }

  // The charts of one run are drawn when its details are opened.
  const places = new Map(curves.map((run) => [run.place, run]));
  const drawDetails = (details) => {
    const holder = details.querySelector(".figures:empty"), run = holder && places.get(Number(holder.dataset.run));
    if (!run || !details.open) return;
    for (const [kind, title, unit] of KINDS) {
      const line = lineOf(run, kind, "step");
      if (!known(line) || (kind === "rate" && run.y.step_s.length)) continue;
      const figure = make("figure"), caption = make("figcaption");
      holder.append(figure);
      const draw = plotOf(figure, 230, (at, [[, text]], note) => (caption.textContent = `${at}: ${text}${note && ` · ${note}`}`));
      const looks = { lines: [line], title, unit, kind, axis: "step", logX: false, logY: kind !== "loss" && spreads([line]) >= LOG_FROM };
      caption.textContent = draw(looks);
      figure.append(caption);
    }
  };
  for (const one of all) {
    one.addEventListener("toggle", () => drawDetails(one));
    drawDetails(one);
  }

  let closed = [];
  addEventListener("beforeprint", () => {
    closed = [...document.querySelectorAll("details:not([open])")];
    closed.forEach((one) => (one.open = true));
    all.forEach(drawDetails);
  });
  addEventListener("afterprint", () => closed.forEach((one) => (one.open = false)));
})();
