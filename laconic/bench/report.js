"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const hidden = new Set();  // names of hidden methods
  const drawings = [];       // functions that redraw a chart

  // --- elements. Text is inserted as text nodes only, because names and reasons come from untrusted runs.

  const SVG = "http://www.w3.org/2000/svg";
  function fill(element, attributes, children) {
    for (const [key, value] of Object.entries(attributes)) if (value != null) element.setAttribute(key, value);
    element.append(...children);
    return element;
  }
  const html = (tag, attributes = {}, ...children) => fill(document.createElement(tag), attributes, children);
  const svg = (tag, attributes = {}, ...children) => fill(document.createElementNS(SVG, tag), attributes, children);

  // --- number formatting

  function number(value, digits = 3) {
    if (value === 0) return "0";
    const size = Math.abs(value);
    if (size >= 1e7 || size < 1e-4) return String(Number(value.toExponential(digits - 1)).toExponential()).replace("e+", "e");
    const places = Math.max(0, digits - 1 - Math.floor(Math.log10(size)));
    return Number(value.toFixed(places)).toLocaleString("en", { maximumFractionDigits: places });
  }
  const UNITS = {
    seconds: [[1e-6, "µs"], [1e-3, "ms"], [1, "s"], [60, "min", 600], [3600, "h", 10800]],
    bytes: [[1, "B"], [1e3, "kB"], [1e6, "MB"], [1e9, "GB"], [1e12, "TB"]],
    share: [[0.01, "%"]],
    count: [[1, ""]],
  };
  function unitFor(kind, largest) {  // the largest unit in which the value is at least 1 (or at least the unit's own threshold)
    const units = UNITS[kind];
    return units.findLast(([size, , from]) => Math.abs(largest) >= (from ?? size) * 0.9995) ?? units[0];
  }
  function text(kind, value, unit = unitFor(kind, value), digits = 3) {
    if (value == null) return "–";
    return number(value / unit[0], digits) + (unit[1] && " " + unit[1]);
  }
  const metricKind = data.share ? "share" : "count";

  // --- scales

  function linear(low, high, from, to) {
    const scale = (value) => from + (value - low) / (high - low || 1) * (to - from);
    scale.ticks = (wanted, size) => {
      const rough = (high - low) / size / wanted;
      const power = 10 ** Math.floor(Math.log10(rough));
      const step = [1, 2, 2.5, 5, 10].find((m) => m * power >= rough * 0.999) * power;
      const ticks = [];
      for (let k = Math.ceil(low / size / step - 1e-9); k * step * size <= high * (1 + 1e-9) + 1e-300; k++) ticks.push(k * step * size);
      return ticks;
    };
    return scale;
  }
  function logarithmic(low, high, from, to) {
    const inner = linear(Math.log10(low), Math.log10(high), from, to);
    const scale = (value) => inner(Math.log10(value));
    scale.ticks = (wanted, size) => {
      for (const mantissas of [[1, 2, 3, 5, 7], [1, 2, 5], [1, 3], [1]]) {
        const ticks = [];
        for (let e = Math.floor(Math.log10(low / size)); 10 ** e * size <= high; e++)
          for (const m of mantissas) if (m * 10 ** e * size >= low * 0.999 && m * 10 ** e * size <= high * 1.001) ticks.push(m * 10 ** e * size);
        if (ticks.length <= wanted * 1.2) return ticks;
      }
      const every = Math.ceil(Math.log10(high / low) / wanted);
      return Array.from({ length: 40 }, (_, k) => size * 10 ** (every * (k - 20))).filter((t) => t >= low * 0.999 && t <= high * 1.001);
    };
    return scale;
  }

  function digitsOf(ticks) {  // enough digits that neighbouring ticks have different labels
    const largest = Math.max(...ticks.map(Math.abs)), spacing = ticks[1] - ticks[0];
    return largest && spacing ? Math.max(3, Math.min(15, 2 + Math.ceil(Math.log10(largest / spacing)))) : 3;
  }

  // --- line charts

  function option(options, name, state, redraw) {
    const button = html("button", { type: "button", class: "option", "aria-pressed": String(state.on) }, name);
    button.addEventListener("click", () => {
      state.on = !state.on;
      button.setAttribute("aria-pressed", String(state.on));
      redraw();
    });
    options.append(button);
  }

  function frame(id, title, note, size = "half") {
    const options = html("div", { class: "options" });
    const notes = note ? [html("p", { class: "note" }, note)] : [];
    const caption = html("figcaption", {}, html("h2", {}, title), options, ...notes);
    const plot = html("div", { class: "plot" });
    document.getElementById("charts").append(html("figure", { id, class: size }, caption, plot));
    return { options, plot };
  }

  // spec: id, title, note, size, x and y {label, kind}, series [{method, x, mean, low, high, rows(i)}], goal, closeUp
  function lineChart(spec) {
    const { options, plot } = frame(spec.id, spec.title, spec.note, spec.size);
    const ends = spec.series.map((s) => Math.max(...s.x));
    const logX = { on: spec.x.kind !== "count" && Math.max(...ends) >= 10 * Math.min(...ends.filter((e) => e > 0)) };
    const values = spec.series.flatMap((s) => s.mean).filter((v) => v != null);
    const canLogY = spec.y.kind === "count" && Math.min(...values) > 0 && Math.max(...values) >= 10 * Math.min(...values);
    const logY = { on: canLogY };
    const closeUp = { on: false };
    let curves = [];
    const draw = () => { curves = drawLines(plot, spec, logX.on, logY.on, closeUp.on); };
    if (spec.x.kind !== "count") option(options, spec.x.kind === "bytes" ? "log bytes" : "log time", logX, draw);
    if (canLogY) option(options, "log " + spec.y.short, logY, draw);
    if (spec.closeUp) option(options, "close-up", closeUp, draw);
    drawings.push(draw);
    hover(plot, spec, () => curves);
  }

  function drawLines(plot, spec, logX, logY, closeUp) {
    plot.replaceChildren();
    const shown = spec.series.filter((s) => !hidden.has(s.method.name)).sort((a, b) => b.method.baseline - a.method.baseline);  // methods on top
    const width = plot.clientWidth;
    const height = Math.round(spec.size ? Math.min(430, Math.max(270, width * 0.6)) : Math.min(300, Math.max(240, width * 0.6)));
    const fits = (s, i) => s.mean[i] != null && s.x[i] != null && !(logX && s.x[i] <= 0) && !(logY && s.low[i] <= 0);
    const points = shown.map((s) => s.mean.map((_, i) => i).filter((i) => fits(s, i)));
    let xs = shown.flatMap((s, k) => points[k].map((i) => s.x[i]));
    const ys = shown.flatMap((s, k) => points[k].flatMap((i) => [s.low[i], s.high[i]]));
    if (!xs.length) {
      plot.append(html("p", { class: "empty" }, shown.length ? "Nothing to draw on this scale." : "All methods are hidden: choose one above."));
      return [];
    }
    const goal = logY && spec.goal <= 0 ? null : spec.goal;
    if (goal != null) ys.push(goal);
    let [low, high] = [Math.min(...ys), Math.max(...ys)];
    if (closeUp) {  // only the best values, and the times at which they were reached
      low = Math.min(high - (high - low) * 0.22, goal != null ? goal - (high - goal) * 0.3 : high);
      const best = shown.flatMap((s, k) => points[k].filter((i) => s.mean[i] >= low).map((i) => s.x[i]));
      if (best.length) xs = best;
    }
    const slack = (high - low) * 0.05 || Math.abs(high) * 0.1 || 1;
    if (logY) [low, high] = [low / 1.15, high * 1.15];
    else [low, high] = [low >= 0 ? Math.max(0, low - slack) : low - slack, high + slack];
    const unitX = unitFor(spec.x.kind, Math.max(...xs));
    const unitY = unitFor(spec.y.kind, high);

    const top = 8, bottom = height - 42;
    const y = (logY ? logarithmic : linear)(low, high, bottom, top);
    const ticksY = y.ticks(Math.max(3, height / 55), unitY[0]);
    const labelsY = ticksY.map((t) => text(spec.y.kind, t, unitY, digitsOf(ticksY)));
    const left = 12 + 7 * Math.max(...labelsY.map((l) => l.length));
    const right = width - 14;
    const lowX = logX ? Math.min(...xs) / 1.05 : closeUp ? Math.min(...xs) : Math.min(0, ...xs);
    const x = (logX ? logarithmic : linear)(lowX, Math.max(...xs) * (logX ? 1.02 : 1), left, right);

    const clip = "clip-" + spec.id;
    const root = svg("svg", { height, viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": spec.title },
      svg("clipPath", { id: clip }, svg("rect", { x: left - 6, y: top - 6, width: right - left + 12, height: bottom - top + 7 })));
    ticksY.forEach((t, k) => root.append(
      svg("line", { class: "grid", x1: left, x2: right, y1: y(t), y2: y(t) }),
      svg("text", { x: left - 8, y: y(t) + 4, "text-anchor": "end" }, labelsY[k])));
    root.append(svg("line", { class: "base", x1: left, x2: right, y1: bottom, y2: bottom }));
    const ticksX = x.ticks(Math.max(3, (right - left) / 100), unitX[0]);
    for (const t of ticksX) root.append(
      svg("line", { class: "base", x1: x(t), x2: x(t), y1: bottom, y2: bottom + 5 }),
      svg("text", { x: x(t), y: bottom + 19, "text-anchor": "middle" },
        text(spec.x.kind, t, logX && spec.x.kind === "bytes" ? undefined : unitX, digitsOf(ticksX))));
    root.append(svg("text", { x: (left + right) / 2, y: height - 4, "text-anchor": "middle" }, spec.x.label));

    const absent = shown.filter((_, k) => !points[k].length).map((s) => `“${s.method.name}”`);
    const curves = shown.flatMap((s, k) => {
      if (!points[k].length) return [];
      const at = points[k].map((i) => ({ i, x: x(s.x[i]), y: y(s.mean[i]) }));
      const path = (list) => list.map(([a, b], j) => (j ? "L" : "M") + a.toFixed(1) + " " + b.toFixed(1)).join("");
      const group = svg("g", { class: "curve " + s.method.colour, "data-name": s.method.name });
      const inner = svg("g", { "clip-path": `url(#${clip})` });
      if (data.seeds > 1 && s.low.some((v, i) => v !== s.high[i])) inner.append(svg("path", {
        class: "band",
        d: path([...at.map((p) => [p.x, y(s.high[p.i])]), ...at.map((p) => [p.x, y(s.low[p.i])]).reverse()]) + "Z",
      }));
      inner.append(svg("path", { d: path(at.map((p) => [p.x, p.y])) }));
      group.append(inner);
      const end = at.at(-1);
      if (end.y <= bottom + 1) group.append(svg("circle", { class: "end", cx: end.x, cy: end.y, r: 4 }));
      root.append(group);
      return { series: s, group, at: at.filter((p) => p.y <= bottom + 1) };
    });
    if (goal != null) root.append(
      svg("line", { class: "goal", x1: left, x2: right, y1: y(goal), y2: y(goal) }),
      svg("text", { class: "goal-text", x: left + 6, y: y(goal) - 6 }, "target " + data.targetText));
    plot.append(root);
    if (absent.length) plot.append(html("p", { class: "note" }, `No point of ${absent.join(", ")} is on this scale.`));
    return curves;
  }

  function hover(plot, spec, curves) {
    const tip = html("div", { class: "tip", role: "status" });
    let marker = null;
    const leave = () => {
      tip.remove();
      marker?.remove();
      for (const c of curves()) c.group.classList.remove("faded");
    };
    plot.addEventListener("pointermove", (event) => {
      leave();
      const box = plot.getBoundingClientRect();
      const [px, py] = [event.clientX - box.left, event.clientY - box.top];
      let best = null;
      for (const c of curves()) for (const p of c.at) {
        const distance = Math.hypot(p.x - px, p.y - py);
        if (distance < (best?.distance ?? 70)) best = { ...p, distance, c };
      }
      if (!best) return;
      const { c, i } = best, s = c.series;
      for (const other of curves()) other.group.classList.toggle("faded", other !== c);
      marker = svg("circle", { class: "cursor", cx: best.x, cy: best.y, r: 5 });
      c.group.append(marker);
      const range = s.low[i] === s.high[i] ? "" : ` (${text(spec.y.kind, s.low[i])} to ${text(spec.y.kind, s.high[i])})`;
      tip.className = "tip " + s.method.colour;
      tip.replaceChildren(html("b", {}, s.method.name), html("div", {}, `${spec.y.short} ${text(spec.y.kind, s.mean[i])}${range}`),
        ...s.rows(i).map((row) => html("div", {}, row)));
      plot.append(tip);
      const flip = best.x + 16 + tip.offsetWidth > box.width;
      tip.style.left = Math.max(0, flip ? best.x - 16 - tip.offsetWidth : best.x + 16) + "px";
      tip.style.top = Math.max(0, Math.min(best.y - tip.offsetHeight / 2, box.height - tip.offsetHeight)) + "px";
    });
    plot.addEventListener("pointerleave", leave);
  }

  // --- bars. spec: id, title, note, keys [[class, text]], kind, rows [{method, total or absent, tracks [[[class, value]]], words}]

  function barChart(spec) {
    const { plot } = frame(spec.id, spec.title, spec.note, spec.size);
    drawings.push(() => {
      const rows = spec.rows.filter((row) => !hidden.has(row.method.name));
      const sum = (track) => track.reduce((all, [, value]) => all + value, 0);
      const largest = Math.max(...rows.flatMap((row) => row.tracks.map(sum)));
      const bar = (track) => html("div", { class: "track" }, ...track.filter(([, value]) => value > 0).map(([look, value]) => {
        const segment = html("i", { class: look });
        segment.style.width = 100 * value / largest + "%";
        return segment;
      }));
      const keys = spec.keys.length ? [html("ul", { class: "keys" }, ...spec.keys.map(([look, name]) => html("li", {}, html("i", { class: look }), name)))] : [];
      plot.replaceChildren(...keys,
        ...rows.map((row) => html("div", { class: "bar " + row.method.colour, "data-name": row.method.name },
          html("div", { class: "name" }, html("span", {}, row.method.name), html("b", {}, row.absent ?? text(spec.kind, row.total))),
          ...row.tracks.map(bar), html("small", {}, row.words))));
      if (!rows.length) plot.append(html("p", { class: "empty" }, "All methods are hidden: choose one above."));
    });
  }

  const cost = (method) => method.target?.seconds ?? Infinity;

  function targetRow(method) {
    if (!method.target) return { method, total: null, absent: "not reached", tracks: [[]], words: "" };
    const { seconds, payload, step, reached, seeds } = method.target;
    const some = reached < seeds ? ` · only ${reached} of ${seeds} seeds` : "";
    return { method, total: seconds, tracks: [[["solid", seconds]]], words: `${number(step)} steps · ${text("bytes", payload)}${some}` };
  }

  const listed = (kind, parts) => parts.map(([name, value]) => name + " " + text(kind, value)).join(" · ");

  function stepTimeRow(method) {
    const { total, ...split } = method.stepTime;
    const looks = [["compute", "compute", "solid"], ["overhead", "overhead", "tint"], ["waiting", "waiting", "hatch"]];
    const known = looks.filter(([key]) => split[key] != null);
    const rest = total - known.reduce((all, [key]) => all + split[key], 0);
    const parts = known.map(([key, name, look]) => [name, split[key], look]);
    if (rest > 0.01 * total) parts.push([known.length ? "not measured" : "total", rest, "open"]);
    return { method, total, tracks: [parts.map(([, value, look]) => [look, value])], words: listed("seconds", parts) };
  }

  function bytesRow(method) {
    const channels = Object.entries(method.payload);
    const look = (name) => (name === "foreground" ? "solid" : "hatch");
    const tracks = [channels.map(([name, value]) => [look(name), value])];
    if (method.nic != null) tracks.push([["plain", method.nic]]);
    const payload = channels.reduce((all, [, value]) => all + value, 0);
    return { method, total: payload, tracks, words: listed("bytes", [...channels, ...(method.nic == null ? [] : [["NIC", method.nic]])]) };
  }

  // --- all charts

  function charts() {
    const seeds = data.seeds > 1 ? "Line: mean over seeds. Band: lowest to highest." : "";
    const drawn = data.methods.filter((method) => method.metric.step.length);
    const title = data.metric[0].toUpperCase() + data.metric.slice(1);
    const detail = (method) => (i) => [
      `after ${text("seconds", method.metric.seconds[i])}, ${number(method.metric.step[i], 9)} steps`,
      `${text("bytes", method.metric.payload[i])} sent by each worker`,
    ];
    const over = (id, words, key, x, size, note) => drawn.length && lineChart({
      id, size, note, x, title: `${title} over ${words}`,
      y: { label: data.metric, short: data.metric, kind: metricKind }, goal: data.target, closeUp: data.higher,
      series: drawn.map((method) => ({ method, ...method.metric, x: method.metric[key], rows: detail(method) })),
    });
    over("metric-seconds", "time", "seconds", { label: "training time, evaluation not counted", kind: "seconds" },
      data.target == null ? "whole" : "large", `On held-out data: the mean of all workers’ models (none: the model of rank 0). ${seeds}`);
    if (data.target != null && drawn.length) barChart({
      id: "to-target", size: "small", title: `Time to ${data.targetText}`, kind: "seconds", keys: [],
      rows: [...data.methods].sort((a, b) => cost(a) - cost(b)).map(targetRow),
      note: "Training time until the first evaluation that is at least that good.",
    });
    over("metric-bytes", "bytes sent", "payload", { label: "payload sent by each worker", kind: "bytes" });
    over("metric-steps", "steps", "step", { label: "steps", kind: "count" });

    const timed = data.methods.filter((method) => method.stepTime);
    if (timed.length) barChart({
      id: "step-time", title: "Time per step", kind: "seconds", rows: timed.map(stepTimeRow),
      note: "Average step, mean over workers.",
      keys: [["solid", "compute"], ["tint", "overhead of the method"], ["hatch", "waiting"],
        ...(timed.some((method) => method.stepTime.compute == null || method.stepTime.waiting == null) ? [["open", "not measured"]] : [])],
    });
    const channels = new Set(data.methods.flatMap((method) => Object.keys(method.payload)));
    if (channels.size) barChart({
      id: "step-bytes", title: "Bytes per step", kind: "bytes", rows: data.methods.map(bytesRow),
      note: "Sent by one worker: the payload, and below it what the network interface (NIC) counted.",
      keys: [...[...channels].map((name) => [name === "foreground" ? "solid" : "hatch", name]),
        ...(data.methods.some((method) => method.nic != null) ? [["plain", "NIC"]] : [])],
    });

    const byStep = (method, columns) => ({ method, ...columns, x: columns.step, rows: (i) => [`step ${number(columns.step[i], 9)}`] });
    const steps = { label: "steps", kind: "count" };
    const trained = data.methods.filter((method) => method.loss.step.length);
    if (trained.length) lineChart({
      id: "train-loss", title: "Training loss over steps", note: seeds, x: steps,
      y: { label: "loss", short: "loss", kind: "count" }, series: trained.map((method) => byStep(method, method.loss)),
    });
    [...new Set(data.methods.flatMap((method) => Object.keys(method.metrics)))].forEach((key, k) => {
      const words = key.replaceAll("_", " ");
      lineChart({
        id: "metric-of-method-" + k, title: `Method metric: ${words}`, note: "As the method reports it.", x: steps,
        y: { label: words, short: words, kind: "count" },
        series: data.methods.filter((method) => method.metrics[key]).map((method) => byStep(method, method.metrics[key])),
      });
    });
    const figures = document.querySelectorAll("#charts .half");
    if (figures.length % 2) figures[figures.length - 1].className = "whole";
  }

  // --- one legend for all charts

  function legend() {
    const nav = document.querySelector(".legend");
    const buttons = new Map();
    const all = html("button", { type: "button", class: "all", hidden: "" }, "show all");
    const update = () => {
      for (const [name, button] of buttons) button.setAttribute("aria-pressed", String(!hidden.has(name)));
      for (const row of document.querySelectorAll("tr[data-name]")) row.classList.toggle("off", hidden.has(row.dataset.name));
      all.hidden = !hidden.size;
      draw();
    };
    for (const method of data.methods) {
      const line = svg("svg", { class: method.colour, viewBox: "0 0 26 12", "aria-hidden": "true" }, svg("path", { d: "M0 6H26" }));
      const button = html("button", { type: "button", title: "click: show or hide; double click: only this one" }, line, method.name);
      button.addEventListener("click", () => {
        if (!hidden.delete(method.name)) hidden.add(method.name);
        update();
      });
      button.addEventListener("dblclick", () => {
        for (const other of data.methods) hidden.add(other.name);
        hidden.delete(method.name);
        update();
      });
      buttons.set(method.name, button);
      nav.append(button);
    }
    all.addEventListener("click", () => { hidden.clear(); update(); });
    nav.append(all);
    nav.hidden = !data.methods.length;
    update();
  }

  const draw = () => { for (const one of drawings) one(); };

  function copying() {
    for (const button of document.querySelectorAll(".copy")) button.addEventListener("click", () => {
      const selection = getSelection();
      selection.selectAllChildren(button.previousElementSibling);
      // navigator.clipboard needs a permission that a page opened from file:// may not get.
      button.textContent = document.execCommand("copy") ? "Copied" : "Press Ctrl+C";
      setTimeout(() => { button.textContent = "Copy"; }, 2000);
    });
  }

  charts();
  legend();
  copying();
  let width = innerWidth;
  addEventListener("resize", () => {
    if (innerWidth !== width) draw();
    width = innerWidth;
  });
})();
