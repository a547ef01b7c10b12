"use strict";
(() => {
  const CLOCKS = { t: "time", step: "steps", bytes: "bytes sent" };
  const DASHES = [[], [8, 4], [2, 3], [10, 3, 2, 3]];
  const COLOURS = 8, ROWS = 60, HEIGHT = 260;
  const root = document.documentElement, main = by("main"), state = by("state"), hidden = new Set();
  let last = by("data").textContent, data = JSON.parse(last), drawings = [];

  function by(id) {
    return document.getElementById(id);
  }

  /** An element; text is always text, never markup. */
  function make(tag, attributes = {}, ...children) {
    const svg = ["svg", "rect", "line", "text", "title"].includes(tag);
    const made = svg ? document.createElementNS(by("svg").namespaceURI, tag) : document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
    made.append(...children);
    return made;
  }

  function colour(name) {
    return getComputedStyle(root).getPropertyValue("--" + name).trim();
  }

  /** Formats a value as text; a fraction with some digits, an integer with all of them. */
  function words(value, digits = 3) {
    if (value === null || value === undefined) return "";
    if (typeof value !== "number") return Array.isArray(value) ? value.join(", ") : String(value);
    const size = Math.abs(value);
    if (value && (size < 1e-4 || size >= 1e15)) return value.toExponential(digits - 1);
    if (Number.isInteger(value) || size >= 10 ** digits) return Math.round(value).toLocaleString("en");
    return value.toLocaleString("en", { maximumSignificantDigits: digits });
  }

  /** For ticks, where there is little room. */
  function short(value) {
    return value === null ? "" : Math.abs(value) < 1e4 ? words(value, 6) :
      value.toLocaleString("en", { notation: "compact", maximumSignificantDigits: 4 });
  }

  /** A name that may break after opening brackets, as a recipe's text has them. */
  function breakable(name) {
    return String(name).split(/(?<=[(])/).flatMap((part, at) => (at ? [make("wbr"), part] : [part]));
  }

  function table(title, columns, rows, digits) {
    const cell = (value) => make("td", typeof value === "number" ? { class: "number" } : {}, words(value, digits));
    const head = make("thead", {}, make("tr", {}, ...columns.map((name) => make("th", { scope: "col" }, name))));
    const body = make("tbody", {}, ...rows.map(([first, ...others]) =>
      make("tr", {}, make("th", { scope: "row" }, ...breakable(words(first, digits))), ...others.map(cell))));
    const said = make("table", {}, ...(title ? [make("caption", {}, title)] : []), ...(columns.length ? [head] : []), body);
    return make("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": title || columns[0] || "figures" }, said);
  }

  /** The figures of a drawing for readers without it; of many rows those at equal distances. */
  function alternative(id, columns, rows) {
    const every = Math.ceil(rows.length / ROWS);
    const some = rows.filter((_, at) => at % every === 0 || at === rows.length - 1);
    const title = every > 1 ? `one row in ${every}, and the last` : "";
    return make("details", { id }, make("summary", {}, "Table"), table(title, columns, some));
  }

  function clock(figure) {
    return by("axis").value === "t" ? figure.clock : CLOCKS[by("axis").value];
  }

  /** A button for each line, which shows or hides the lines of that name. */
  function legend(names) {
    return make("div", { class: "chips" }, ...names.map((name, at) => {
      const chip = make("button", { type: "button", "aria-pressed": !hidden.has(name), title: "shows or hides the line" }, make("i"), name);
      chip.style.setProperty("--chip", `var(--line-${at % COLOURS})`);
      chip.addEventListener("click", () => {
        if (!hidden.delete(name)) hidden.add(name);
        chip.setAttribute("aria-pressed", !hidden.has(name));
        draw();
      });
      return chip;
    }));
  }

  function drawChart(figure, box) {
    const x = by("axis").value, ink = colour("ink"), rule = colour("rule");
    const shared = data.runs.length > 0 && figure.lines.every((line) => line.run !== undefined);
    const axis = { stroke: ink, grid: { stroke: rule, width: 1 }, ticks: { stroke: rule, width: 1 }, values: (_, at) => at.map(short) };
    const lines = figure.lines.map((line, at) => {
      const number = shared ? line.run : line.faint ? at + 1 : at;
      return {
        stroke: colour(`line-${number % COLOURS}`), width: line.faint ? 1 : 2, alpha: line.faint ? 0.5 : 1,
        show: !hidden.has(shared ? data.runs[line.run] : line.name), dash: DASHES[Math.floor(number / 2) % DASHES.length], spanGaps: true,
        points: { show: line.y.length < 40 && !line.stepped, size: 6 },
        paths: line.stepped ? uPlot.paths.stepped({ align: 1 }) : undefined,
      };
    });
    const plot = make("div"), readout = make("p", { class: "readout" }, "\u00a0");
    if (!shared && lines.length > 1) box.append(legend(figure.lines.map((line) => line.name)));
    box.append(plot, readout);
    /** Tells the values at the cursor; of a line without a point there the last one before. */
    function read(drawn) {
      const at = drawn.cursor.idx;
      if (at === null || at === undefined) return readout.replaceChildren("\u00a0");
      const values = lines.flatMap((line, number) => {
        const before = line.show ? drawn.data[number + 1].slice(0, at + 1).findLast((value) => typeof value === "number") : undefined;
        if (before === undefined) return [];
        const value = make("b", {}, words(before));
        value.style.color = line.stroke;
        return [" ", value];
      });
      readout.replaceChildren(`${clock(figure)} ${words(drawn.data[0][at])}:`, ...values);
    }
    const drawn = new uPlot({
      width: box.clientWidth, height: HEIGHT, scales: { x: { time: false }, y: figure.zero ? { range: { min: { soft: 0, mode: 1 }, max: { pad: 0.1, soft: 0, mode: 1 } } } : {} },
      axes: [{ ...axis, label: clock(figure), labelSize: 22 }, { ...axis, label: figure.label, labelSize: 22, size: 58 }],
      legend: { show: false }, hooks: { setCursor: [read] }, series: [{}, ...lines],
    }, uPlot.join(figure.lines.map((line) => [line[x], line.y])), plot);
    return () => drawn.destroy();
  }

  function chartTable(figure, id) {
    const same = figure.lines.every((line) => JSON.stringify(line.step) === JSON.stringify(figure.lines[0].step));
    const at = ["step", "t", "bytes"], named = ["step", figure.clock, "bytes sent"];
    if (same) {
      const [first] = figure.lines;
      return alternative(id, [...named, ...figure.lines.map((line) => line.name)],
        first.step.map((_, row) => [...at.map((x) => first[x][row]), ...figure.lines.map((line) => line.y[row])]));
    }
    return alternative(id, ["line", ...named, figure.label],
      figure.lines.flatMap((line) => line.step.map((_, row) => [line.name, ...at.map((x) => line[x][row]), line.y[row]])));
  }

  function key(names) {
    return make("div", { class: "key", "aria-hidden": "true" }, ...names.map(([name, shade]) => {
      const square = make("i");
      square.style.background = `var(--${shade})`;
      return make("span", {}, square, name);
    }));
  }

  function drawBars(figure, box) {
    const longest = Math.max(...figure.rows.map((row) => row.slice(1).reduce((sum, one) => sum + one, 0))) || 1;
    const wide = `${Math.min(32, Math.max(...figure.rows.map(([name]) => String(name).length)) + 3)}ch`;
    box.append(...figure.rows.map(([rank, ...seconds]) => {
      const bar = make("div");
      seconds.forEach((one, part) => {
        const piece = make("div", { title: `${figure.columns[part + 1]}: ${words(one)}` });
        Object.assign(piece.style, { background: `var(--part-${figure.shades[part]})`, width: `${(100 * one) / longest}%` });
        bar.append(piece);
      });
      const name = make("span", {}, ...breakable(rank));
      name.style.width = wide;
      return make("div", { class: "bar" }, name, bar);
    }), key(figure.shades.map((shade, part) => [figure.columns[part + 1], `part-${shade}`])));
  }

  /** Steps of each rank in a row, and the exchanges under way below them, in lanes where they overlap. */
  function drawGantt(figure, box) {
    const left = 52, width = box.clientWidth - 8, row = 46;
    const ranks = [...new Set(figure.rows.map(([rank]) => rank))];
    const begin = Math.min(...figure.rows.map((one) => one[3])), end = Math.max(...figure.rows.map((one) => one[4]));
    const at = (t) => left + ((t - begin) / (end - begin || 1)) * (width - left);
    const height = row * ranks.length + 24, drawn = make("svg", { width, height });
    for (let tick = 0; tick <= 4; tick++) {
      const t = begin + ((end - begin) * tick) / 4, anchor = tick === 4 ? "end" : "middle";
      drawn.append(make("line", { x1: at(t), x2: at(t), y1: 0, y2: height - 18 }));
      if (tick % 2 === 0 || width > 500) drawn.append(make("text", { x: at(t), y: height - 4, "text-anchor": anchor }, `${Number(t.toPrecision(4))} s`));
    }
    const lanes = ranks.map(() => []);
    for (const [rank, what, step, from, to] of figure.rows) {
      const place = ranks.indexOf(rank), part = figure.shades[what], wide = Math.max(1, at(to) - at(from));
      let y = row * place + 2, tall = 20;
      if (part === undefined) {
        const free = lanes[place].findIndex((last) => last <= from), lane = free < 0 ? lanes[place].length : free;
        lanes[place][lane] = to;
        y += 22 + 7 * (lane % 3);
        tall = 6;
      }
      const shade = part === undefined ? "exchange" : `part-${part}`;
      const piece = make("rect", { x: at(from), y, width: wide, height: tall, fill: `var(--${shade})`, stroke: "var(--paper)", "stroke-width": 0.5 });
      piece.append(make("title", {}, `rank ${rank}, step ${step}: ${what}, ${words(to - from)} s`));
      drawn.append(piece);
      if (part !== undefined && wide > 24) drawn.append(make("text", { class: `inside ${shade}`, x: at(from) + wide / 2, y: y + 14 }, String(step)));
    }
    ranks.forEach((rank, place) => drawn.append(make("text", { x: 0, y: row * place + 16 }, `rank ${rank}`)));
    const seen = new Set(figure.rows.map((one) => one[1]));
    box.append(drawn, key([...seen].map((what) => [what, what in figure.shades ? `part-${figure.shades[what]}` : "exchange"])));
  }

  const DRAW = { chart: drawChart, bars: drawBars, gantt: drawGantt };

  function figureOf(figure, id) {
    const made = make("div", { class: figure.kind === "chart" ? "figure" : "figure wide" });
    if (figure.kind === "table") {
      made.append(table(figure.title, figure.columns, figure.rows, figure.exact ? 15 : 3));
      return made;
    }
    const box = make("div", { role: "img", "aria-label": `${figure.title}; its figures are in the table below` });
    if (figure.kind === "chart") box.setAttribute("role", "group");
    const told = figure.kind === "chart" ? chartTable(figure, id) : alternative(id, figure.columns, figure.rows);
    made.append(make("h3", {}, figure.title), box, told);
    drawings.push({ figure, box, undo: undefined });
    return made;
  }

  function draw() {
    for (const drawing of drawings) {
      drawing.undo?.();
      drawing.box.replaceChildren();
      drawing.undo = DRAW[drawing.figure.kind](drawing.figure, drawing.box);
    }
  }

  function render() {
    const open = new Set([...main.querySelectorAll("details[open]")].map((one) => one.id));
    const focused = document.activeElement?.closest("details")?.id;
    drawings.forEach((drawing) => drawing.undo?.());
    drawings = [];
    state.textContent = data.state;
    by("sections").replaceChildren(...data.sections.map((one, at) => make("a", { href: `#section-${at}` }, one.title)));
    main.replaceChildren(
      ...(data.simulated ? [make("p", { class: "simulated" }, data.simulated)] : []),
      ...(data.runs.length ? [legend(data.runs)] : []),
      ...data.sections.map((one, at) => make("section", { id: `section-${at}` }, make("h2", {}, one.title),
        make("div", { class: "figures" }, ...one.figures.map((figure) => figureOf(figure, `${one.title}: ${figure.title}`))))));
    by("axis").parentElement.hidden = !drawings.some(({ figure }) => figure.kind === "chart");
    draw();
    for (const one of main.querySelectorAll("details")) {
      one.open = open.has(one.id);
      if (one.id === focused) one.querySelector("summary").focus({ preventScroll: true });
    }
  }

  function paint() {
    const dark = matchMedia("(prefers-color-scheme: dark)").matches;
    root.dataset.theme = by("theme").value || (dark ? "dark" : "light");
  }

  /** Asks for newer figures again and again, a tenth of the time at most; says so where there is no answer. */
  async function follow() {
    let wait = 2000;
    try {
      const began = performance.now(), answer = await fetch("data.json", { cache: "no-store" }), text = await answer.text();
      wait = Math.max(wait, 10 * (performance.now() - began));
      if (!answer.ok) throw new Error(text);
      if (text !== last) {
        data = JSON.parse(text);
        last = text;
        render();
      }
    } catch (error) {
      state.textContent = `No newer figures (${error.message}); these are the last ones.`;
      last = "";
    }
    setTimeout(follow, wait);
  }

  by("axis").append(...Object.entries(CLOCKS).map(([value, name]) => make("option", { value }, name)));
  by("axis").addEventListener("change", draw);
  by("theme").addEventListener("change", () => { paint(); draw(); });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { paint(); draw(); });
  let wide = innerWidth;
  addEventListener("resize", () => {
    if (innerWidth !== wide) draw();
    wide = innerWidth;
  });
  paint();
  render();
  if (data.live) setTimeout(follow, 2000);
})();
