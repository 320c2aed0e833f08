"use strict";
// Draws the figures of the page with Vega-Lite. Their specifications come from Python (report_figures.py); this file only
// fits them to the width of the page, and lets the reader hide contenders, zoom, and save what is drawn.
(() => {
  const { figures, table } = JSON.parse(document.getElementById("data").textContent);
  const hidden = new Set();  // names of hidden contenders
  const NARROW = 480;        // below this width in pixels, labels beside lines would leave no room for the lines

  // Text is inserted as text nodes only, because names and reasons come from runs of unknown origin.
  function html(tag, attributes = {}, ...children) {
    const element = document.createElement(tag);
    for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
    element.append(...children);
    return element;
  }

  // --- drawing

  function fitted(spec, width, config) {
    const copy = structuredClone(spec);
    if (width < NARROW) copy.layer = copy.layer.filter((layer) => !layer.name?.startsWith("label-"));
    for (const [name, rows] of Object.entries(copy.datasets)) copy.datasets[name] = rows.filter((row) => !hidden.has(row.method));
    if (copy.height.step) copy.height = copy.height.step * copy.datasets.rows.length;
    return { ...copy, config, width, autosize: { type: "fit-x", contains: "padding" } };
  }

  const tip = html("div", { class: "tip", role: "status" });
  function showTip(_, event, item, text) {
    tip.remove();
    if (!text) return;
    const [first, ...rest] = text.split("\n");
    tip.replaceChildren(html("b", {}, first), ...rest.map((line) => html("div", {}, line)));
    document.body.append(tip);
    const beyond = event.clientX + 14 + tip.offsetWidth > document.documentElement.clientWidth;
    tip.style.left = scrollX + Math.max(4, beyond ? event.clientX - 14 - tip.offsetWidth : event.clientX + 14) + "px";
    tip.style.top = scrollY + event.clientY + 14 + "px";
  }

  class Drawing {
    constructor(element, figure, config) {
      Object.assign(this, { element, figure, config, view: null, chosen: figure.spec });
    }
    draw() {
      const plot = this.element.querySelector(".plot");
      const width = plot.clientWidth;
      this.view?.finalize();
      this.view = null;
      if (this.element.closest("details:not([open])")) return;
      const spec = fitted(this.chosen, width, this.config);
      plot.classList.toggle("narrow", width < NARROW);
      if (!spec.datasets.rows.length) return plot.replaceChildren(html("p", { class: "empty" }, "All methods here are hidden: choose one above."));
      plot.replaceChildren();
      const runtime = charts.parse(charts.compile(spec).spec, null, { ast: true });  // as an AST: the page forbids eval
      this.view = new charts.View(runtime, { expr: charts.expressionInterpreter, renderer: "svg", container: plot, logLevel: charts.Error })
        .tooltip(showTip);
      return this.view.runAsync().then(() => {
        const svg = plot.querySelector("svg");
        svg.setAttribute("role", "img");
        svg.setAttribute("aria-label", `${this.figure.title}. ${this.figure.note}`);
      });
    }
    save(kind) {
      const name = `${this.figure.id}.${kind}`;
      if (kind === "csv") return download(name, "text/csv", csv(this.figure.columns, this.figure.spec.datasets[this.figure.table]));
      return this.view.toSVG().then((svg) => download(name, "image/svg+xml", svg));
    }
  }

  // --- saving

  const field = (value) => (/[",\n\r]/.test(value) ? `"${String(value).replaceAll('"', '""')}"` : value ?? "");
  function csv(columns, rows) {
    const lines = [Object.values(columns), ...rows.map((row) => Object.keys(columns).map((key) => row[key]))];
    return lines.map((line) => line.map(field).join(",") + "\r\n").join("");
  }

  function download(name, type, text) {
    const link = html("a", { href: URL.createObjectURL(new Blob([text], { type })), download: name });
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 10000);
  }

  // --- the page

  function buttons(drawing) {
    const { element, figure } = drawing;
    const options = element.querySelector(".options");
    for (const [name, spec] of Object.entries(figure.alternatives)) {
      const button = html("button", { type: "button", class: "option", "aria-pressed": "false" }, name);
      button.addEventListener("click", () => {
        const on = drawing.chosen === figure.spec;
        drawing.chosen = on ? { ...spec, datasets: { ...figure.spec.datasets, ...spec.datasets } } : figure.spec;
        button.setAttribute("aria-pressed", String(on));
        drawing.draw();
      });
      options.append(button);
    }
    for (const kind of ["csv", "svg"]) {
      const button = html("button", { type: "button", class: "save", title: `save this figure as ${kind.toUpperCase()}` }, kind.toUpperCase());
      button.addEventListener("click", () => drawing.save(kind));
      options.append(button);
    }
  }

  function legend(drawings) {
    const buttons = [...document.querySelectorAll(".legend button[data-name]")];
    const all = document.querySelector(".legend .all");
    const names = buttons.map((button) => button.dataset.name);
    const update = () => {
      for (const button of buttons) button.setAttribute("aria-pressed", String(!hidden.has(button.dataset.name)));
      for (const marked of document.querySelectorAll("tr[data-name], .keys [data-name]")) marked.classList.toggle("off", hidden.has(marked.dataset.name));
      all.hidden = !hidden.size;
      for (const drawing of drawings) drawing.draw();
    };
    for (const button of buttons) {
      const name = button.dataset.name;
      button.addEventListener("click", () => { if (!hidden.delete(name)) hidden.add(name); update(); });
      button.addEventListener("dblclick", () => { for (const other of names) hidden.add(other); hidden.delete(name); update(); });
    }
    all.addEventListener("click", () => { hidden.clear(); update(); });
  }

  function copying() {
    for (const button of document.querySelectorAll(".copy")) button.addEventListener("click", () => {
      const selection = getSelection();
      selection.selectAllChildren(button.previousElementSibling);
      // navigator.clipboard needs a permission that a page opened from file:// may not get.
      button.textContent = document.execCommand("copy") ? "Copied" : "Press Ctrl+C";
      setTimeout(() => { button.textContent = "Copy"; }, 2000);
    });
  }

  const drawings = figures.list.map((figure) => new Drawing(document.getElementById(figure.id), figure, figures.config));
  drawings.forEach(buttons);
  legend(drawings);
  copying();
  document.querySelector(".save-table")?.addEventListener("click", () => download("laconic.csv", "text/csv", csv(table.columns, table.rows)));
  document.querySelector(".internals")?.addEventListener("toggle", () => drawings.forEach((drawing) => drawing.view || drawing.draw()));
  const draw = () => Promise.all(drawings.map((drawing) => drawing.draw()));
  let width = innerWidth;
  addEventListener("resize", () => { if (innerWidth !== width) draw(); width = innerWidth; });
  for (const event of ["beforeprint", "afterprint"]) addEventListener(event, draw);
  draw().then(() => { document.documentElement.dataset.drawn = "yes"; });
})();
