
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

  let closed = [];
  addEventListener("beforeprint", () => {
    closed = [...document.querySelectorAll("details:not([open])")];
    closed.forEach((one) => (one.open = true));
  });
  addEventListener("afterprint", () => closed.forEach((one) => (one.open = false)));
})();
