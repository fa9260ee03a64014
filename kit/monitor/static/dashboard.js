// Front end of the dashboard: draws the numbers that the kernel sends, and sends the user's requests to the kernel.
// It is one module without imports. The kernel puts uPlot (an IIFE that defines `uPlot`), numbers.js and svg.js before it.

// Colours and number format of each default chart. The kernel sends the names of the series in order, and their titles.
const LOOKS = { // logY: whether the "log y" button changes the y axis of this series
  loss: { light: "#0072B2", dark: "#56B4E9", format: loss, logY: true },
  mfu: { light: "#007A5A", dark: "#2BCB9A", format: (v) => (100 * v).toFixed(1) + " %", logY: false },
  tokens_per_s: { light: "#9A4A78", dark: "#E08FC0", format: short, logY: false },
  grad_norm: { light: "#B34D00", dark: "#FF9A52", format: norm, logY: true },
  learning_rate: { light: "#0072B2", dark: "#56B4E9", format: rate, logY: false },
  memory_bytes: { light: "#007A5A", dark: "#2BCB9A", format: bytes, logY: false },
};
const LARGE = 2; // Number of default charts at the beginning that are drawn larger than the others.
const COLOURS = [["#0072B2", "#56B4E9"], ["#007A5A", "#2BCB9A"], ["#9A4A78", "#E08FC0"], ["#B34D00", "#FF9A52"]]; // Colours, light and dark, of the charts that the user adds.
const DASHES = [[6, 4], [2, 3], [10, 3, 2, 3]]; // Dashes of the curves of other runs. Three runs have the same dashes, and different colours.
const SHOWN_SETTINGS = 4; // Number of differing settings of each run in the legend. All are in the table of settings.
const CHOICE = "kit-monitor-charts"; // Key in the browser's localStorage of the user's choice of charts, for all runs: names of added metrics and of hidden default charts.
const ICONS = { running: "▶", done: "✔", stopped: "■", failed: "✖", lost: "✖", stalled: "⚠", stopping: "■", preempted: "⏏", imported: "↧" };
const ACTIONS = [
  ["checkpoint", "Checkpoint now", "Save a checkpoint at the next step and go on", false],
  ["stop", "Stop after step", "Save a checkpoint at the next step and end", true],
  ["cancel", "Stop now", "End the job at once, without a checkpoint", true],
  ["resume", "Resume", "Start the job again from its last checkpoint", false],
];
const HEAT = { light: [[238, 243, 248], [158, 188, 218], [178, 60, 0]], dark: [[30, 38, 52], [86, 120, 160], [255, 190, 80]] }; // Colours of step times of 0.8, 1.1 and 1.4 times the median.
const AXIS_NAMES = { step: "step", tokens: "tokens", time: "elapsed time" };
const PARTS = { // Colours of the categories of the time of a run (TIME_CATEGORIES in goodput.py).
  productive: "#009E73", repeated: "#D55E00", "first step": "#56B4E9", "start-up": "#0072B2", checkpoints: "#CC79A7", validation: "#E6C229",
  "between steps": "#8C8C8C", ending: "#8B6FB3", lost: "#C4162A", waiting: "#8884",
};
const STEP_PARTS = { data: "#E69F00", "forward, backward": "#009E73", reduction: "#56B4E9", optimizer: "#0072B2", waits: "#8886" };
// The kernel sends a heartbeat every 2 s until the run has ended. A kernel without a heartbeat for SILENT_AFTER_MS is reported as silent.
const SILENT_AFTER_MS = 10000, BUSY_AFTER_MS = 1500, OLD_AFTER_S = 30, SHOWN_ALERTS = 3;
// Kernel statuses of JupyterLab after which the Python side of this view no longer exists.
const ENDED = ["restarting", "autorestarting", "terminating", "dead"];

function make(tag, className, parent, text) {
  const element = document.createElement(tag);
  if (className) element.className = className;
  if (text != null) element.textContent = text;
  if (parent) parent.appendChild(element);
  return element;
}

// A screen reader reads a live region aloud whenever its text is set, so an unchanged text is not set again.
function say(element, text) { if (element.textContent !== text) element.textContent = text; }

// Returns a number of the last step as text, or a dash if the number was never recorded.
function numberOf(facts, key, format) {
  if ((facts.not_finite || []).includes(key)) return "not finite";
  return facts[key] == null ? "–" : format(facts[key]);
}

function isDark(element) {
  for (let e = element; e; e = e.parentElement) {
    const c = getComputedStyle(e).backgroundColor.match(/[\d.]+/g);
    if (c && (c.length < 4 || +c[3] > 0.5)) return 0.299 * c[0] + 0.587 * c[1] + 0.114 * c[2] < 128;
  }
  return matchMedia("(prefers-color-scheme: dark)").matches;
}

// Returns the user's choice of charts. Some pages, such as a notebook in a sandboxed frame, have no localStorage. There the choice lasts as long as the view.
function storedChoice() {
  let stored = null;
  try { stored = JSON.parse(localStorage.getItem(CHOICE)); } catch { /* no localStorage, or a damaged text */ }
  const names = (list) => (Array.isArray(list) ? list.filter((name) => typeof name === "string") : []);
  return { added: names(stored?.added), hidden: names(stored?.hidden) };
}
function sameNames(a, b) { return JSON.stringify(a) === JSON.stringify(b); }
function storeChoice(choice) {
  try { localStorage.setItem(CHOICE, JSON.stringify(choice)); } catch { /* no localStorage */ }
}

function render({ model, el }) {
  let panes = [], hosts = []; // The shown charts: key, title, colours and format of each, and its HTML elements. `showCharts` fills both.
  const choice = storedChoice();
  const pageNotice = model.get("page"); // Text that a page of `kit watch --html` shows. Such a page has no kernel, and its numbers do not change.
  const root = make("section", "kit-monitor" + (pageNotice ? " kit-page" : ""), el);
  root.setAttribute("aria-label", "training run");
  const view = { axis: "step", start: null, end: null, log_x: false };
  const state = { dark: isDark(root), logY: true, enlarged: null, yRanges: new Map(), rows: null, frame: {}, plots: [], facts: {}, heard: Date.now(), beat: {}, ended: false, asked: {}, frozen: false, number: 0, waiting: 0 };
  const hidden = make("style", "", root); // Style rule that hides the static picture for readers without a kernel.
  const sync = uPlot.sync("kit" + Math.random());
  // Every message has a number, and the kernel reports the number of the last message that it has handled. So the view knows that a request waits.
  const send = (content) => { const number = (state.number = Math.max(Date.now(), state.number + 1)); model.send({ ...content, number }); return number; };

  // --- head: name and state of the run, and notices about the kernel
  const head = make("header", "kit-head", root);
  const name = make("strong", "kit-name", head);
  const badge = make("span", "kit-badge", head);
  badge.setAttribute("role", "status");
  const reason = make("span", "kit-muted kit-reason", head);
  const notice = make("span", "kit-notice", head);
  notice.setAttribute("role", "status");

  const places = make("p", "kit-muted kit-places", root);

  const progress = make("div", "kit-progress", root);
  progress.setAttribute("role", "progressbar");
  progress.setAttribute("aria-label", "steps done");
  const bar = make("div", "", progress);

  // --- tiles
  const tiles = make("div", "kit-tiles", root), tile = {};
  const formula = make("p", "kit-note", root);
  formula.hidden = true;
  for (const [key, label] of [["loss", "Loss"], ["mfu", "MFU"], ["speed", "Tokens/s"], ["step", "Step"], ["tokens", "Tokens seen"],
    ["eta", "Time left"], ["grad", "Gradient norm"], ["memory", "Memory of rank 0"]]) {
    const box = make(key === "mfu" ? "button" : "div", "kit-tile", tiles);
    make("span", "kit-label", box, label);
    tile[key] = make("span", "kit-value", box, "–");
    tile[key].box = box;
    tile[key].small = make("span", "kit-small", box);
    tile[key].kind = make("span", "kit-small", box); // Text that says over which steps the number is taken.
  }
  const TILE_OF = { tokens_per_s: "speed", grad_norm: "grad", memory_bytes: "memory" };
  const shortName = ({ key, title, isAdded }) => (isAdded || key === "learning_rate" ? title : tile[TILE_OF[key] || key].box.firstChild.textContent);
  const mfuBox = tile.mfu.box;
  mfuBox.type = "button";
  mfuBox.setAttribute("aria-expanded", "false");
  mfuBox.onclick = () => { formula.hidden = !formula.hidden; mfuBox.setAttribute("aria-expanded", String(!formula.hidden)); };

  // --- comparison with the predicted speed, and time of the run by category
  const verdict = make("p", "kit-verdict", root), goodput = make("div", "kit-goodput", root), shares = make("p", "kit-shares kit-muted", root);
  const mix = make("p", "kit-muted", root);
  const devices = make("p", "kit-muted", root);
  goodput.setAttribute("role", "img");

  // --- controls
  const tools = make("div", "kit-tools", root);
  const chooser = (label, options, change) => {
    const wrap = make("label", "kit-choice", tools, label + " ");
    const select = make("select", "", wrap);
    select.setAttribute("aria-label", label + " axis");
    for (const [value, text] of options) { const o = make("option", "", select, text); o.value = value; }
    select.onchange = () => change(select.value);
    return select;
  };
  const toggle = (text, title, pressed, change) => {
    const button = make("button", "kit-button", tools, text);
    button.type = "button";
    button.title = title;
    button.setAttribute("aria-pressed", String(pressed));
    button.onclick = () => { const on = button.getAttribute("aria-pressed") !== "true"; button.setAttribute("aria-pressed", String(on)); change(on); };
    return button;
  };
  const axisChoice = chooser("x", Object.entries(AXIS_NAMES), (v) => { view.axis = v; zoom(null, null); });
  // A page without a kernel hides the elements of class kit-live.
  toggle("log x", "Logarithmic x axis", false, (on) => { view.log_x = on; ask(); }).classList.add("kit-live");
  toggle("log y", "Logarithmic loss and gradient norm", true, (on) => { state.logY = on; build(); });
  const slide = make("label", "kit-choice kit-live", tools, "Smoothing ");
  const slider = make("input", "", slide);
  Object.assign(slider, { type: "range", min: 0, max: 1, step: 0.005 });
  const slideValue = make("output", "kit-number", slide);
  const weight = () => { const v = 1 - 10 ** (-3 * slider.value); return +v.toPrecision(4); }; // The slider has fine steps near a weight of 1, where small changes matter.
  const smoothedSteps = (weightOfPast) => `about ${whole(1 / (1 - weightOfPast))} steps`; // Mean age of the values in the average.
  const showWeight = () => { slideValue.textContent = weight() ? smoothedSteps(weight()) : "none"; };
  let slideTimer;
  slider.oninput = () => { showWeight(); clearTimeout(slideTimer); slideTimer = setTimeout(() => { expect(send({ type: "smoothing", value: weight() })); }, 120); };
  const full = make("button", "kit-button", tools, "Whole run");
  full.type = "button";
  full.title = "Show the whole run (Esc)";
  full.onclick = () => zoom(null, null);
  toggle("table", "The charts' numbers as a table", false, (on) => { table.hidden = download.hidden = !on; showTable(); });
  const acts = make("span", "kit-acts kit-live", tools);
  const buttons = {};
  for (const [action, text, title, dangerous] of ACTIONS) {
    const button = (buttons[action] = make("button", "kit-button" + (dangerous ? " kit-danger" : ""), acts, text));
    button.type = "button";
    button.title = title;
    let armed = null;
    const disarm = () => { clearTimeout(armed); armed = null; button.textContent = text; };
    button.onclick = () => {
      if (dangerous && !armed) { button.textContent = "Really " + text.toLowerCase() + "?"; armed = setTimeout(disarm, 4000); return; }
      disarm();
      state.asked[action] = Date.now();
      expect(send({ type: "action", name: action }));
      showActions();
    };
  }
  const history = make("div", "kit-muted kit-history kit-live", root);
  history.setAttribute("role", "status");

  // --- alerts: below the buttons, so that a new alert does not move a button that the user is about to press
  const alerts = make("ul", "kit-alerts", root);
  alerts.setAttribute("role", "log");
  alerts.setAttribute("aria-live", "polite");
  alerts.setAttribute("aria-label", "alerts");
  let allAlerts = false;

  // --- charts
  const above = make("div", "kit-above", root), legend = make("p", "kit-muted kit-legend", above);
  const addition = make("select", "kit-add", above);
  addition.setAttribute("aria-label", "Add a curve");
  addition.onchange = () => {
    const key = addition.value;
    if (choice.hidden.includes(key)) choice.hidden = choice.hidden.filter((name) => name !== key);
    else choice.added = [...choice.added, key];
    changeCharts();
  };
  function showLegend() {
    const weightOfPast = state.frame.smoothing || 0;
    say(legend, [
      "Charts: pale = each step", weightOfPast ? `line = smoothed over ${smoothedSteps(weightOfPast)} (learning rate and memory: each step)` : "line = each step",
      "○ = validation loss" + (panes.some((_, i) => isSparse(i)) ? ", or another number that few steps have" : ""), numOthers() ? "dashed curve = another run" + (weightOfPast ? ", smoothed" : "") : "",
    ].filter(Boolean).join("; ") + ".");
  }
  const runs = make("ul", "kit-muted kit-runs", root);
  runs.setAttribute("aria-label", "compared runs");
  // Names the compared runs with their colours, and the settings in which they differ.
  function showRuns() {
    const { others = [], rows = [], differing = [] } = model.get("settings") || {}, now = JSON.stringify([others, rows, differing, state.dark, state.facts.name]);
    runs.hidden = !others.length;
    if (runs.hidden || runs.dataset.shown === now) return;
    runs.dataset.shown = now;
    const differ = rows.filter(([name]) => differing.includes(name));
    runs.replaceChildren(...[state.facts.name || "this run", ...others].map((label, k) => {
      const item = make("li", "", null), swatch = make("i", "", item), texts = differ.map((row) => `${settingName(row[0])} ${row[1 + k]}`);
      swatch.style.borderTop = `3px ${k ? "dashed" : "solid"} ${runColour(k)}`;
      make("strong", "", item, label);
      const hiddenOnes = texts.length - SHOWN_SETTINGS;
      make("span", "", item, (texts.length ? texts.slice(0, SHOWN_SETTINGS).join(", ") : "equal settings") + (hiddenOnes > 0 ? ` and ${hiddenOnes} more` : ""));
      item.title = texts.join("\n");
      return item;
    }));
  }
  const settingName = (name) => (name === "site" ? "site" : name === "spec.name" ? "model" : name.slice(name.indexOf(".") + 1).replaceAll("_", " "));
  // Returns the colour of a run in all charts, if several runs are compared. Run 0 is the run of the dashboard.
  function runColour(k) { return COLOURS[k ? 1 + ((k - 1) % (COLOURS.length - 1)) : 0][state.dark ? 1 : 0]; }
  const grid = make("div", "kit-grid", root);
  const defaults = () => model.get("charts"), metrics = () => model.get("metrics") || [];
  // Returns the charts that the user wants and the run has: default charts that are not hidden, then added ones in the order in which they were added.
  function wantedCharts() {
    const own = defaults().map((chart, i) => ({ ...chart, ...LOOKS[chart.key], isLarge: i < LARGE })).filter(({ key }) => !choice.hidden.includes(key));
    const added = choice.added.filter((key) => metrics().some((metric) => metric.key === key)).map((key, i) => {
      const [light, dark] = COLOURS[i % COLOURS.length];
      return { key, title: key, light, dark, format: /_bytes$/.test(key) ? bytes : number, logY: false, isLarge: false, isAdded: true };
    });
    return [...own, ...added];
  }
  let askedCharts = null; // Names of the charts whose numbers the kernel sends, or soon will send.
  // Shows the wanted charts, and asks the kernel for their numbers, if they are not the present ones.
  function showCharts(isUsers = false) {
    const wanted = wantedCharts(), keys = wanted.map(({ key }) => key);
    showAddition(keys);
    if (hosts.length && sameNames(keys, panes.map(({ key }) => key))) return;
    state.hover = null;
    state.plots.forEach((plot) => plot.destroy());
    state.plots = [];
    panes = wanted;
    hosts = panes.map(makeHost);
    grid.replaceChildren(...hosts.map(({ figure }) => figure));
    showEnlarged();
    root.dataset.charts = keys.length;
    askedCharts ??= model.get("frame")?.charts;
    if (!sameNames(keys, askedCharts)) expect(send({ type: "charts", keys: (askedCharts = keys) }), isUsers);
    if (state.rows) build(); // The first frame builds the first charts.
    if (state.facts.state) showTiles(state.facts);
  }
  function changeCharts() {
    storeChoice(choice);
    showCharts(true);
    addition.focus(); // The pressed button of a hidden chart no longer exists.
  }
  function showAddition(shown) {
    const options = [...defaults(), ...metrics().map(({ key, meaning }) => ({ key, title: key, meaning }))].filter(({ key }) => !shown.includes(key));
    const now = JSON.stringify(options);
    if (addition.dataset.options === now) return; // A new list would close a list that the user has opened.
    addition.dataset.options = now;
    addition.replaceChildren(make("option", "", null, "Add a curve"), ...options.map(({ key, title, meaning }) => Object.assign(make("option", "", null, title), { value: key, title: meaning || "" })));
    addition.firstChild.disabled = true;
    addition.disabled = !options.length;
    addition.title = options.length ? "Draw another number of metrics.jsonl, or a chart that was hidden" : "The run has no other numbers";
    addition.selectedIndex = 0;
  }
  function makeHost({ key, title, isLarge }, i) {
    const figure = make("figure", "kit-chart" + (isLarge ? " kit-large" : "")), caption = make("figcaption", "", figure);
    make("span", "kit-title", caption, title).title = metrics().find((metric) => metric.key === key)?.meaning || title;
    const last = make("span", "kit-last", caption);
    const enlarge = make("button", "kit-hide", caption, "⤢");
    enlarge.type = "button";
    enlarge.title = "Enlarge this chart, set its y axis, download it";
    enlarge.setAttribute("aria-label", "Enlarge " + title);
    enlarge.onclick = () => { state.enlarged = state.enlarged === key ? null : key; showEnlarged(); };
    const hide = make("button", "kit-hide", caption, "×");
    hide.type = "button";
    hide.title = "Hide this chart";
    hide.setAttribute("aria-label", "Hide " + title);
    hide.onclick = () => {
      if (choice.added.includes(key)) choice.added = choice.added.filter((name) => name !== key);
      else choice.hidden = [...choice.hidden, key];
      changeCharts();
    };
    const plot = make("div", "kit-plot", figure);
    plot.tabIndex = 0;
    plot.setAttribute("role", "img");
    plot.onmousemove = (event) => { state.hover = { pane: i, x: event.clientX, y: event.clientY }; showHover(); };
    plot.onmouseleave = () => { state.hover = null; showHover(); };
    return { key, figure, plot, last, enlarge, tools: makeChartTools(i, figure) };
  }
  // Makes the tools below an enlarged chart: limits of its y axis, and downloads.
  function makeChartTools(i, figure) {
    const { key, title } = panes[i], [unit, factor] = key === "mfu" ? [" %", 0.01] : /_bytes$/.test(key) ? [" GiB", 2 ** 30] : ["", 1];
    const tools = make("div", "kit-tools", figure), file = `${state.facts.name || "run"}-${key}`;
    const press = (text, hint, work) => { const button = make("button", "kit-button", tools, text); button.type = "button"; button.title = hint; button.onclick = work; };
    const range = state.yRanges.get(key) || [null, null];
    const inputs = ["y from", "to"].map((text, end) => {
      const label = make("label", "kit-choice", tools, text + " "), input = make("input", "kit-rank", label);
      Object.assign(input, { type: "number", step: "any", value: range[end] == null ? "" : range[end] / factor });
      input.setAttribute("aria-label", `${title}: ${end ? "highest" : "lowest"} y`);
      label.append(unit);
      input.onchange = () => setYRange(key, inputs.map(({ value }) => (value === "" ? null : value * factor)));
      return input;
    });
    press("Automatic", "Fit the y axis to the numbers", () => { inputs.forEach((input) => { input.value = ""; }); setYRange(key, [null, null]); });
    press("SVG", "Download this chart as a picture", () => { if (state.rows) save(chartSvg(i), "image/svg+xml", file + ".svg"); });
    press("CSV", "Download the numbers of this chart", () => { if (state.rows) save(csvText(csvColumns([i])), "text/csv", file + ".csv"); });
    return tools;
  }
  // Sets the ends of the y axis of a chart. An end that is null is found from the numbers.
  function setYRange(key, range) {
    state.yRanges.set(key, range);
    state.plots.forEach((plot, i) => { if (panes[i].key === key) plot.setData(plot.data); });
    showEnlarged();
  }
  function showEnlarged() {
    hosts.forEach(({ key, figure, tools, enlarge }, i) => {
      const isEnlarged = key === state.enlarged, isFixed = (state.yRanges.get(key) || []).some((end) => end != null);
      figure.classList.toggle("kit-enlarged", isEnlarged);
      tools.hidden = !isEnlarged;
      enlarge.classList.toggle("kit-fixed", isFixed);
      enlarge.title = isFixed ? "The y axis of this chart is set by hand" : "Enlarge this chart, set its y axis, download it";
      enlarge.setAttribute("aria-expanded", String(isEnlarged));
      enlarge.setAttribute("aria-label", `${isEnlarged ? "Shrink" : "Enlarge"} ${panes[i].title}`);
    });
    resize();
  }

  // --- numbers under the pointer: a layer above the view, which moves no other element
  const hover = make("table", "kit-hover", root);
  hover.hidden = true;
  function showHover() {
    const pane = state.hover?.pane, at = pane == null ? null : state.plots[pane]?.cursor.idx;
    hover.hidden = at == null || !state.rows || state.rows[0][at] == null;
    if (hover.hidden) return;
    const row = (texts, className) => { const line = make("tr", className, null); texts.forEach((text, k) => make(k ? "td" : "th", "", line, text)); return line; };
    const lines = [row([placeOf(at), "each step", state.frame.smoothing ? "smoothed" : ""], "kit-hover-head")];
    panes.forEach(({ key, format }, i) => {
      const [, low, high, average] = dataOf(i), known = (v) => (v == null ? "–" : format(v)), here = i === pane ? "kit-here" : "";
      const least = known(low[at] ?? (isSparse(i) ? average[at] : null)), most = known(high[at]), raw = least === most || high[at] == null ? least : `${least} … ${most}`;
      const smoothed = state.frame.smoothing && isSmoothed(key) ? known(average[at]) : "";
      lines.push(row([shortName(panes[i]), raw, smoothed], here));
      if (key === "loss") {
        const validation = validationRow();
        let last = at;
        while (last >= 0 && validation[last] == null) last--;
        if (last >= 0) lines.push(row([last === at ? "○ validation" : `○ validation, ${placeOf(last)}`, known(validation[last]), ""], here));
      }
      // In the large table of all charts, only the chart under the pointer has the numbers of all runs.
      if (i === pane) othersOf(i).forEach(({ label, line, values }) => lines.push(row([label, known(values[at]), state.frame.smoothing && isSmoothed(key) ? known(line[at]) : ""], here)));
    });
    hover.replaceChildren(...lines);
    placeHover();
  }
  // Places the numbers beside the pointer, within the visible part of the view.
  function placeHover() {
    const box = root.getBoundingClientRect(), seen = { left: box.left, top: box.top, right: box.right, bottom: box.bottom };
    for (let e = root.parentElement; e; e = e.parentElement) {
      if (e !== document.body && e !== document.documentElement && getComputedStyle(e).overflowY === "visible") continue;
      const { left, top, width, height } = e === document.documentElement || e === document.body ? { left: 0, top: 0, width: innerWidth, height: innerHeight } : e.getBoundingClientRect();
      Object.assign(seen, { left: Math.max(seen.left, left), top: Math.max(seen.top, top), right: Math.min(seen.right, left + width), bottom: Math.min(seen.bottom, top + height) });
    }
    const { offsetWidth: w, offsetHeight: h } = hover, { x, y } = state.hover, gap = 14;
    const left = x + gap + w <= seen.right ? x + gap : x - gap - w, top = y + gap + h <= seen.bottom ? y + gap : y - gap - h;
    const within = (v, low, high) => Math.max(low, Math.min(v, high));
    hover.style.left = within(left, seen.left + 2, seen.right - w - 2) - box.left - root.clientLeft + "px";
    hover.style.top = within(top, seen.top + 2, seen.bottom - h - 2) - box.top - root.clientTop + "px";
  }

  // --- the data of the charts as numbers
  const table = make("table", "kit-table", root);
  table.hidden = true;
  function showTable() {
    if (table.hidden) return;
    const cells = (tag, texts) => { const row = make("tr", "", null); texts.forEach((text, i) => { const cell = make(i ? tag : "th", "", row, text); if (!i || tag === "th") cell.scope = i || tag === "td" ? "row" : "col"; }); return row; };
    const range = state.rows ? `${place(state.rows[0][0])} to ${place(lastOf(state.rows[0]))}` : "no step yet";
    table.replaceChildren(make("caption", "", null, `Charts in numbers, ${range}`), cells("th", ["series", "smoothed, last", "lowest", "highest"]));
    panes.forEach(({ title, format }, i) => {
      const [, low, high, average] = state.rows ? dataOf(i) : [[], [], [], []], known = (v) => (v == null ? "–" : format(v));
      const least = low.reduce((a, v) => (v == null || (a != null && a <= v) ? a : v), null), most = high.reduce((a, v) => (v == null || (a != null && a >= v) ? a : v), null);
      table.append(cells("td", [title, known(lastOf(average)), known(least), known(most)]));
    });
  }

  const download = make("button", "kit-button kit-download", root, "Download as CSV");
  download.type = "button";
  download.title = "All numbers that the charts show now, one line per pixel";
  download.hidden = true;
  download.onclick = () => { if (state.rows) save(csvText(csvColumns(panes.map((_, i) => i))), "text/csv", `${state.facts.name || "run"}.csv`); };
  function save(text, type, file) {
    const link = Object.assign(document.createElement("a"), { href: URL.createObjectURL(new Blob([text], { type })), download: file });
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 60_000); // The browser reads the text after the click.
  }
  // Returns the columns [name, values] of some charts. A pixel may contain several steps, so a chart has its least and largest value.
  function csvColumns(indices) {
    const columns = [[state.frame.axis, state.rows[0]]];
    for (const i of indices) {
      const { key } = panes[i], [, low, high, line] = dataOf(i), kind = isSmoothed(key) ? "smoothed" : "line";
      columns.push([`${key}, least`, low], [`${key}, largest`, high], [`${key}, ${kind}`, line]);
      if (key === "loss") columns.push(["validation_loss", validationRow()]);
      for (const other of othersOf(i)) columns.push([`${other.label}, ${key}`, other.values], [`${other.label}, ${key}, ${kind}`, other.line]);
    }
    return columns;
  }
  // Returns a chart as the text of an SVG file, with the present range of its axes.
  function chartSvg(i) {
    const plot = state.plots[i], { key, title, light, dark } = panes[i], { frame } = state, [x, low, high, line] = dataOf(i), others = othersOf(i);
    const own = others.length ? COLOURS[0] : [light, dark], isDots = isSparse(i);
    const smoothing = frame.smoothing && isSmoothed(key) ? `, smoothed over ${smoothedSteps(frame.smoothing)}` : "";
    const curves = [{ label: state.facts.name, colours: own, values: line, width: 1.8 }];
    others.forEach(({ label, line }, k) => curves.push({ label, colours: COLOURS[1 + (k % (COLOURS.length - 1))], values: line, width: 1.5, dash: dashOf(k) }));
    const dots = key === "loss" ? validationRow() : isDots ? high : null;
    return svgText({
      title: `${title} over ${AXIS_NAMES[frame.axis]}${smoothing}`, x, curves, dots, band: isDots ? null : { colours: own, low, high },
      dotsLabel: key === "loss" ? "validation loss" : title, levels: key === "loss" ? frame.levels || {} : {},
      attempts: (frame.attempts || []).slice(1), xScale: plot.scales.x, yScale: plot.scales.y, xTicks: xTicks(plot), yTicks: yTicks(plot, i),
    });
  }

  // --- ranks and log
  const low = make("div", "kit-low", root);
  const rankFigure = make("figure", "kit-chart", low);
  const rankTitle = make("figcaption", "", rankFigure, "Step time by rank, over the median");
  const heat = make("canvas", "kit-heat", rankFigure);
  heat.setAttribute("role", "img");
  const rankScale = make("div", "kit-muted kit-scale", rankFigure);
  const split = make("table", "kit-split", rankFigure);
  const logFigure = make("figure", "kit-chart kit-logs kit-live", low);
  const logHead = make("figcaption", "", logFigure);
  make("span", "", logHead, "Log");
  const rankLabel = make("label", "kit-choice", logHead, "rank ");
  const rankInput = make("input", "kit-rank", rankLabel);
  Object.assign(rankInput, { type: "number", min: 0, value: 0 });
  const search = make("input", "kit-search", logHead);
  Object.assign(search, { type: "search", placeholder: "search" });
  search.setAttribute("aria-label", "search the log");
  const followLabel = make("label", "kit-choice", logHead);
  const follow = make("input", "", followLabel);
  Object.assign(follow, { type: "checkbox", checked: true });
  followLabel.append(" follow");
  const log = make("pre", "kit-log", logFigure);
  log.tabIndex = 0;
  log.setAttribute("aria-label", "log lines");
  let searchTimer;
  const askLog = () => { clearTimeout(searchTimer); searchTimer = setTimeout(() => { expect(send({ type: "log", search: search.value, rank: +rankInput.value || 0 })); }, 200); };
  search.oninput = rankInput.onchange = askLog;
  follow.onchange = showLog;

  // --- settings and notes, folded
  const fold = (title) => { const part = make("details", "kit-fold", root); make("summary", "", part, title); return part; };
  const settingsPart = fold("Settings"), settingsTable = make("table", "kit-table kit-settings", make("div", "kit-scroll", settingsPart));
  function onSettings() {
    const { others = [], rows = [] } = model.get("settings") || {}, parts = { spec: "model", plan: "plan", recipe: "recipe", site: "site" };
    const differs = (row) => row.slice(2).some((text) => text !== row[1]), different = rows.filter(differs);
    settingsPart.hidden = !rows.length;
    settingsPart.firstChild.textContent = others.length ? `Settings (${different.length} differ between the runs)` : "Settings";
    const line = (tag, texts, className) => { const row = make("tr", className, null); texts.forEach((text, k) => { const cell = make(k ? tag : "th", "", row, text); cell.scope = k ? "col" : "row"; }); return row; };
    const title = (text) => { const row = make("tr", "", null), cell = make("th", "kit-part", row, text); cell.colSpan = 2 + others.length; return row; };
    const label = (name) => (name.includes(".") ? name.slice(name.indexOf(".") + 1) : "name");
    const lines = others.length ? [line("th", ["", state.facts.name || "this run", ...others])] : [];
    if (different.length) lines.push(title("different"), ...different.map((row) => line("td", row, "kit-differs")));
    for (const [part, text] of Object.entries(parts)) {
      const ofPart = rows.filter((row) => row[0].split(".")[0] === part && row[0] !== "site.name" && !differs(row));
      if (ofPart.length) lines.push(title(text), ...ofPart.map(([name, ...texts]) => line("td", [label(name), ...texts])));
    }
    settingsTable.replaceChildren(...lines);
    showRuns();
  }
  const notesPart = fold("Notes"), notesText = make("textarea", "kit-notes kit-live", notesPart), notesShown = make("pre", "kit-log kit-notes", notesPart);
  Object.assign(notesText, { maxLength: 20000, rows: 5, placeholder: "What this run is for, and what it has shown" });
  notesText.setAttribute("aria-label", "notes of the run");
  const notesTools = make("div", "kit-tools kit-live", notesPart), saveNotes = make("button", "kit-button", notesTools, "Save notes"), notesState = make("span", "kit-muted", notesTools);
  saveNotes.type = "button";
  notesState.setAttribute("role", "status");
  let storedNotes = "", sentNotes = null;
  saveNotes.onclick = () => { sentNotes = notesText.value; expect(send({ type: "notes", text: sentNotes })); showNotesState(); };
  notesText.oninput = () => showNotesState();
  function onNotes() {
    const { text = "", is_editable: isEditable = false } = model.get("notes") || {}, wasEdited = notesText.value !== storedNotes;
    if (text === sentNotes) sentNotes = null;
    if (!wasEdited && notesText.value !== text) notesText.value = text; // A text that the user is writing is not replaced.
    storedNotes = text;
    const isShownOnly = !isEditable || !!pageNotice;
    notesText.hidden = notesTools.hidden = isShownOnly;
    notesShown.hidden = !isShownOnly;
    notesPart.hidden = isShownOnly && !text;
    say(notesShown, text);
    say(notesPart.firstChild, `Notes${text ? ": " + text.trim().split("\n")[0].slice(0, 100) : ""}`);
    showNotesState();
  }
  function showNotesState() {
    const { error } = model.get("notes") || {}, isChanged = notesText.value !== storedNotes;
    saveNotes.disabled = !isChanged;
    say(notesState, !isChanged ? "" : error || (sentNotes === notesText.value ? "sent …" : "not saved"));
  }

  // --- state of the kernel: JupyterLab reports it; in other front ends, only the arrival of messages is known
  const manager = model.widget_manager, knowsKernel = !!manager && "kernel" in manager;
  const kernel = () => (knowsKernel ? manager.kernel : null);
  const firstKernel = kernel();
  const onKernelStatus = (_, status) => { if (ENDED.includes(status)) { state.ended = true; showNotice(); } };
  firstKernel?.statusChanged?.connect(onKernelStatus);
  const hasEnded = () => state.ended || (knowsKernel && (!kernel() || kernel().id !== firstKernel?.id || ENDED.includes(kernel().status)));
  const isBusy = () => state.beat.busy || kernel()?.status === "busy";
  const hear = () => { state.heard = Date.now(); };
  function onMessage(message) {
    if (message?.type !== "beat") return;
    hear();
    state.beat = message;
    showNotice();
  }

  // --- requests to the kernel
  let busyTimer;
  function expect(number, isUsers = true) { // Expects an answer to a message. If none comes, the kernel runs a cell, and the message waits until the cell has ended.
    state.waiting = number;
    state.isUsers ||= isUsers; // A message that the view sends by itself, with its width, is not shown as a request of the user.
    clearTimeout(busyTimer);
    busyTimer = setTimeout(() => { state.frozen = true; showNotice(); }, BUSY_AFTER_MS);
  }
  function answered(number) {
    if (!state.waiting || !(number >= state.waiting)) return;
    state.waiting = 0;
    state.isUsers = false;
    clearTimeout(busyTimer);
    if (state.frozen) { state.frozen = false; showNotice(); }
  }
  function ask(isUsers = true) {
    const width = numPixels();
    expect(send({ type: "view", ...view, width }), isUsers);
    full.disabled = view.start == null;
  }
  function numPixels() { return Math.round(Math.max(...(hosts.length ? hosts : [{ plot: grid }]).map(({ plot }) => plot.clientWidth)) * (window.devicePixelRatio || 1)); }
  function zoom(start, end) {
    view.start = start;
    view.end = end;
    for (const plot of state.plots) plot.setData(plot.data); // The new range is drawn at once from the present numbers. More detailed numbers follow.
    ask();
  }

  // --- drawing
  function build() {
    state.plots.forEach((plot) => plot.destroy());
    state.dark = isDark(root);
    root.classList.toggle("kit-on-dark", state.dark);
    state.plots = hosts.map(makePlot);
    draw();
  }
  function size(host, i) { return { width: Math.max(100, host.plot.clientWidth), height: host.key === state.enlarged ? 420 : panes[i].isLarge ? 230 : 120 }; }
  function makePlot(host, i) {
    const { key, light, dark, logY } = panes[i];
    const colour = numOthers() ? runColour(0) : state.dark ? dark : light, log = state.logY && logY;
    const grey = state.dark ? "#c4c4c4" : "#505050", faint = state.dark ? "#ffffff18" : "#00000014";
    const axis = { stroke: grey, font: "11px system-ui, sans-serif", grid: { stroke: faint, width: 1 }, ticks: { show: false }, gap: 4 };
    const line = { stroke: colour + "50", width: 0.8, points: { show: false } };
    const circles = { stroke: colour, paths: () => null, points: { show: true, filter: apart, size: 6, width: 1.6, stroke: state.dark ? "#fff" : "#222", fill: state.dark ? "#111" : "#fff" } };
    const series = [{}, line, isSparse(i) ? circles : line, { stroke: colour, width: 1.8, points: { show: false } }];
    if (key === "loss") series.push(circles);
    (state.frame.others || []).forEach((_, k) => series.push({ stroke: runColour(k + 1), width: 1.4, dash: dashOf(k), points: { show: false } }));
    const yRange = (u, a, b) => {
      const [lowest, highest] = state.yRanges.get(key) || [], [low, high] = automaticRange(a, b), from = log && lowest <= 0 ? low : lowest ?? low;
      return (highest ?? high) > from ? [from, highest ?? high] : [low, high];
    };
    const automaticRange = (a, b) => {
      if (a == null) return log ? [1, 10] : [0, 1];
      const levels = key === "loss" && view.start == null ? Object.values(state.frame.levels || {}) : [];
      a = Math.min(a, ...levels);
      b = Math.max(b, ...levels);
      const band = bandOf(key);
      if (band) [a, b] = [Math.min(a, band[0]), Math.max(b, Math.min(band[1], 4 * b))]; // A predicted speed that is far away must not make the curve look flat.
      if (log && a > 0) return [a * 0.97, b * 1.04 + (a === b ? 1e-9 : 0)];
      if (["mfu", "tokens_per_s", "memory_bytes"].includes(key)) a = Math.min(a, 0.75 * b); // The axis is extended downwards, so that noise of one per cent looks small.
      const pad = 0.06 * (b - a) || Math.abs(b) * 0.05 || 1;
      return [key === "mfu" || (a >= 0 && a < pad) ? Math.max(0, a - pad) : a - pad, b + pad];
    };
    return new uPlot({
      ...size(host, i), padding: [8, 22, 0, 0], legend: { show: false },
      cursor: { sync: { key: sync.key }, drag: { x: true, y: false }, points: { size: 6 }, bind: { dblclick: () => () => { zoom(null, null); return null; } } },
      scales: {
        x: { time: false, distr: view.log_x ? 3 : 1, range: (u, a, b) => (view.start != null ? [view.start, view.end] : a == null ? [view.log_x ? 1 : 0, 10] : [a, b > a ? b : a + 1]) },
        y: { distr: log ? 3 : 1, range: yRange },
      },
      axes: [
        { ...axis, size: 24, splits: (u) => xTicks(u).map(([v]) => v), values: (u) => xTicks(u).map(([, text]) => text), filter: (u, vs) => vs },
        { ...axis, size: 58, splits: (u) => yTicks(u, i).map(([v]) => v), values: (u) => yTicks(u, i).map(([, text]) => text), filter: (u, vs) => vs },
      ],
      series, bands: isSparse(i) ? [] : [{ series: [2, 1], fill: colour + (state.dark ? "48" : "33") }],
      hooks: {
        setSelect: [(u) => {
          if (u.select.width <= 5) return;
          const a = u.posToVal(u.select.left, "x"), b = u.posToVal(u.select.left + u.select.width, "x");
          u.setSelect({ left: 0, width: 0, top: 0, height: 0 }, false);
          zoom(a, b);
        }],
        draw: [(u) => marks(u, key, grey)],
      },
    }, Array.from(series, () => []), host.plot);
  }
  function dashOf(k) { return DASHES[Math.floor(k / (COLOURS.length - 1)) % DASHES.length]; }
  // Return the ticks [position, text] of an axis of a chart.
  function xTicks(u) { const { min, max } = u.scales.x; return splits(min, max, view.log_x, Math.max(3, u.width / 70), state.frame.axis === "time" ? 0 : 1).map((v) => [v, axisValue(state.frame.axis, v)]); }
  function yTicks(u, i) {
    const { key, isLarge, logY } = panes[i], { min, max } = u.scales.y, at = ticks(min, max, state.logY && logY, u.height > 300 ? 9 : isLarge ? 6 : 4, key);
    return at.map((v) => [v, key === "mfu" ? +(100 * v).toPrecision(3) : /_bytes$/.test(key) ? bytes(v) : key === "learning_rate" ? (v ? v.toExponential(digits(at)) : "0") : short(v, significant(at))]);
  }
  // Draws the first steps of attempts as ticks and baseline losses as dashed lines, and names other runs at the end of their curves.
  function marks(u, key, grey) {
    const { ctx, bbox } = u, ratio = window.devicePixelRatio || 1, frame = state.frame;
    ctx.save();
    ctx.beginPath();
    ctx.rect(bbox.left, bbox.top, bbox.width, bbox.height);
    ctx.clip();
    ctx.strokeStyle = ctx.fillStyle = grey;
    ctx.lineWidth = ratio;
    ctx.font = `${11 * ratio}px system-ui, sans-serif`;
    ctx.textAlign = "left";
    ctx.textBaseline = "alphabetic"; // uPlot has set another baseline, with which a text would touch its line.
    const write = (text, x, y) => { // Draws a text with a halo, since it may cover a curve.
      ctx.save();
      ctx.setLineDash([]);
      ctx.lineWidth = 4 * ratio;
      ctx.lineJoin = "round";
      ctx.strokeStyle = state.dark ? "#1e1e1ecc" : "#ffffffcc";
      ctx.strokeText(text, x, y);
      ctx.restore();
      ctx.fillText(text, x, y);
    };
    const rule = (x0, y0, x1, y1, dash) => { ctx.setLineDash(dash.map((d) => d * ratio)); ctx.beginPath(); ctx.moveTo(x0, y0); ctx.lineTo(x1, y1); ctx.stroke(); };
    if ((frame.attempts || []).length > 1)
      for (const { attempt, x } of frame.attempts.slice(1)) {
        const at = Math.round(u.valToPos(x, "x", true));
        rule(at, bbox.top, at, bbox.top + bbox.height, [2, 3]);
        if (bbox.width <= 300 * ratio) continue;
        const words = "attempt " + attempt, gap = 4 * ratio, width = ctx.measureText(words).width;
        const isCut = at + gap + width > bbox.left + bbox.width;
        write(words, isCut ? at - gap - width : at + gap, bbox.top + 10 * ratio);
      }
    if (key === "loss") {
      ctx.textAlign = "right";
      const right = bbox.left + bbox.width - 4 * ratio;
      for (const [label, level] of Object.entries(frame.levels || {})) {
        const at = u.valToPos(level, "y", true);
        rule(bbox.left, at, bbox.left + bbox.width, at, [6, 4]);
        write(`${label} ${level.toFixed(2)}`, right, at - 5 * ratio);
      }
      (frame.others || []).forEach((label, k) => {
        const values = u.data[5 + k] || [];
        const value = lastOf(values);
        ctx.fillStyle = runColour(k + 1);
        if (value != null) write(label, Math.min(right, u.valToPos(u.data[0][values.lastIndexOf(value)], "x", true)), u.valToPos(value, "y", true) - 14 * ratio);
      });
    }
    ctx.fillStyle = grey;
    const band = bandOf(key);
    if (band && lastOf(u.data[3]) != null) {
      const from = (frame.attempts || []).find(({ attempt }) => attempt === state.facts.speed.band.attempt);
      const at = (v) => Math.min(Math.max(u.valToPos(v, "y", true), bbox.top), bbox.top + bbox.height);
      const left = from && !(view.log_x && from.x <= 0) ? Math.max(bbox.left, u.valToPos(from.x, "x", true)) : bbox.left, right = bbox.left + bbox.width;
      const [top, bottom] = [at(band[1]), at(band[0])];
      ctx.save();
      ctx.fillStyle = state.dark ? "#ffffff1c" : "#00000012";
      ctx.fillRect(left, top, right - left, bottom - top);
      ctx.restore();
      // An edge outside the chart has no line: at the border of the chart, the line would show a wrong value.
      for (const v of band) if (v >= u.scales.y.min && v <= u.scales.y.max) rule(left, at(v), right, at(v), [2, 3]);
      ctx.textAlign = "right";
      const words = bandInWords(key), fits = ctx.measureText(words).width < bbox.width;
      const value = at(lastOf(u.data[3])), isNearBottom = bottom - value < value - top; // The text is written at the edge that is farther from the curve.
      write(fits ? words : "expected", right - 4 * ratio, isNearBottom ? top + 24 * ratio : Math.max(bottom - 5 * ratio, bbox.top + 12 * ratio));
    }
    if (key === "mfu" && state.facts.step && state.facts.mfu == null && lastOf(u.data[3]) == null) {
      ctx.textAlign = "center";
      write(`No MFU: ${state.facts.why_no_mfu || "no step has a duration"}`, bbox.left + bbox.width / 2, bbox.top + bbox.height / 2);
      if (state.facts.why_no_mfu) write("measure it: kit bench --apply RUN", bbox.left + bbox.width / 2, bbox.top + bbox.height / 2 + 18 * ratio);
    }
    ctx.restore();
  }
  function bandOf(key) { // Returns the expected range of a speed. The band also has the number of its attempt.
    const band = (state.facts.speed || {}).band || {};
    return Object.hasOwn(band, key) && Array.isArray(band[key]) ? band[key] : null;
  }
  function bandInWords(key) { return `${state.facts.speed.label}: ${bandOf(key).map((v) => panes.find((pane) => pane.key === key).format(v)).join(" to ")}`; }
  function isSmoothed(key) { return (state.frame.smoothed || []).includes(key); }
  function isSparse(i) { return !!panes[i].isAdded && (state.frame.charts || []).includes(panes[i].key) && !isSmoothed(panes[i].key); }
  function numRows() { return 3 * (state.frame.charts || []).length; } // Rows of all charts. The rows of validation and other runs follow.
  function dataOf(i) {
    const rows = state.rows, { key } = panes[i], at = state.frame.charts.indexOf(key), first = 1 + 3 * at;
    const data = at < 0 ? [rows[0], ...[0, 1, 2].map(() => rows[0].map(() => null))] : [rows[0], ...rows.slice(first, first + 3)]; // The kernel has not sent the numbers of a chart that was just added.
    return data;
  }
  // Returns all that a chart draws: the numbers of the run, for the loss also the validation loss, and the lines of other runs.
  function drawnOf(i) { return [...dataOf(i), ...(panes[i].key === "loss" ? [validationRow()] : []), ...othersOf(i).map(({ line }) => line)]; }
  function validationRow() { return state.rows[1 + numRows()]; }
  function numOthers() { return (state.frame.others || []).length; }
  // Returns name, line and raw values of each other run in a chart.
  function othersOf(i) {
    const at = state.frame.charts.indexOf(panes[i].key), none = () => state.rows[0].map(() => null);
    return (state.frame.others || []).map((label, k) => {
      const first = 2 + numRows() + 2 * (at * numOthers() + k);
      return at < 0 ? { label, line: none(), values: none() } : { label, line: state.rows[first], values: state.rows[first + 1] };
    });
  }
  // A pixel may contain several steps. Its `x` is the last of them.
  function placeOf(at) {
    const [x, low, high] = state.rows, several = numRows() && state.frame.axis === "step" && at && low[at] !== high[at] && x[at] > x[at - 1] + 1;
    return several ? `steps ${whole(x[at - 1] + 1)} to ${whole(x[at])}` : place(x[at]);
  }
  function place(x) { return `${AXIS_NAMES[state.frame.axis]} ${axisValue(state.frame.axis, x)}`; }
  function attemptsInWords() { return (state.frame.attempts || []).slice(1).map(({ attempt, x }) => `; attempt ${attempt} from ${place(x)}`).join(""); }
  function draw() {
    root.dataset.points = state.rows ? state.rows[0].length : 0;
    if (!state.rows) return;
    state.plots.forEach((plot, i) => {
      const data = drawnOf(i);
      plot.setData(data);
      const { key, title, format } = panes[i], value = lastOf(data[3]);
      let label = `${title}: `;
      if (value == null) label += "no data";
      else label += `${isSmoothed(key) ? "smoothed " : ""}${format(value)} at ${place(lastOf(data[0]))}, from ${place(data[0][0])} on${attemptsInWords()}`;
      if (bandOf(key)) label += `; ${bandInWords(key)}`;
      hosts[i].plot.setAttribute("aria-label", label);
    });
    showHover();
    showTable();
    root.dataset.draws = +(root.dataset.draws || 0) + 1;
  }

  // --- handlers for data from the kernel
  const waiting = new Map();
  const later = (work) => { if (!waiting.has(work)) waiting.set(work, requestAnimationFrame(() => { waiting.delete(work); if (root.isConnected) work(); })); };
  function onFrame() {
    const frame = model.get("frame");
    if (!frame) return;
    hear();
    answered(frame.heard);
    const layoutOf = ({ others, log_x, charts, smoothed }) => JSON.stringify([others, log_x, charts, smoothed]), rebuild = layoutOf(frame) !== layoutOf(state.frame);
    state.frame = frame;
    state.rows = unpack(model.get("window"), frame.n);
    showLegend();
    if (document.activeElement !== slider && frame.smoothing != null) { slider.value = -Math.log10(1 - frame.smoothing) / 3; showWeight(); }
    if (rebuild || !state.plots.length) build(); else draw();
    showNotice();
  }
  function onFacts() {
    const f = (state.facts = model.get("facts") || {});
    if (!f.state) return;
    hear();
    answered(f.heard);
    name.textContent = f.name;
    name.title = f.directory;
    const rule = f.picture ? `.kit-still-${f.picture} { display: none !important; }` : "";
    if (hidden.textContent !== rule) hidden.textContent = rule;
    say(badge, f.as_of ? `last seen ${f.state_word}` : `${ICONS[f.state_word] || "…"} ${f.state_word}`);
    root.dataset.state = f.state;
    badge.dataset.state = f.as_of ? "" : f.state_word; // The badge is grey if the present state is unknown.
    const saved = (f.checkpoints || []).at(-1);
    reason.textContent = `attempt ${f.attempt} · ${whole(f.devices)} device${f.devices === 1 ? "" : "s"}${f.host ? " · " + f.host : ""} · ${f.reason}${saved == null ? "" : ` · last checkpoint: step ${whole(saved)}`}`;
    showPlaces(f);
    const share = f.num_steps ? Math.min(100, (100 * f.step) / f.num_steps) : 0;
    bar.style.width = share + "%";
    progress.setAttribute("aria-valuenow", share.toFixed(1));
    root.dataset.step = f.step;
    root.dataset.attempt = f.attempt;
    showTiles(f);
    showSpeed(f.speed || {});
    mix.textContent = f.data || "";
    mix.hidden = !f.data;
    devices.textContent = f.device_text || "";
    devices.hidden = !f.device_text;
    showActions();
    showNotice();
    rankInput.max = f.ranks - 1;
    rankLabel.hidden = f.ranks < 2;
    formula.textContent = mfuBox.title = f.formula || "";
  }
  // Shows where the run is: its directory, its job, and its page in a tracker. A click selects a whole name, so that it can be copied.
  function showPlaces(f) {
    const now = JSON.stringify([f.directory, f.job_id, f.tracker]);
    if (places.dataset.shown === now) return; // A new text would remove the user's selection.
    places.dataset.shown = now;
    places.replaceChildren();
    for (const text of [f.directory, f.job_id]) if (text) make("span", "kit-place", places, text);
    if (f.tracker) Object.assign(make("a", "", places, f.tracker), { href: f.tracker, target: "_blank", rel: "noopener noreferrer" });
  }
  function showTiles(f) {
    const put = (key, text, small, kind) => { tile[key].textContent = text; tile[key].small.textContent = small || ""; tile[key].kind.textContent = kind || ""; };
    const median = f.speed_steps ? `median of ${f.speed_steps} step${f.speed_steps > 1 ? "s" : ""}` : "", last = f.step ? "last step" : "";
    put("loss", numberOf(f, "loss", loss), last);
    put("mfu", f.mfu == null ? "–" : (100 * f.mfu).toFixed(1) + " %", f.hfu == null ? f.why_no_mfu || "" : `HFU ${(100 * f.hfu).toFixed(1)} %`, f.mfu == null ? "" : median);
    put("speed", short(f.tokens_per_s), f.step_time_s == null ? "" : `${+f.step_time_s.toPrecision(3)} s per step`, median);
    put("step", whole(f.step), `of ${whole(f.num_steps)}`);
    put("tokens", short(f.tokens), f.tokens_left ? `${short(f.tokens_left)} left` : "");
    const spent = f.cost ? "$" + (f.cost.value < 100 ? f.cost.value.toFixed(2) : whole(f.cost.value)) : "";
    put("eta", f.eta_s == null ? "–" : duration(f.eta_s), spent && `${spent} so far`);
    tile.eta.box.title = f.cost ? `Cost: node hours x price per node hour, ${f.cost.note}` : "";
    put("grad", numberOf(f, "grad_norm", norm), last);
    put("memory", f.memory_bytes == null ? "–" : bytes(f.memory_bytes), f.device_bytes ? `of ${bytes(f.device_bytes)}` : "", last);
    // The learning rate has no tile, so its number is written beside its chart. All other charts have a tile.
    const rateHost = hosts.find(({ key }) => key === "learning_rate");
    if (rateHost) rateHost.last.textContent = f.learning_rate == null ? "" : `last step ${rate(f.learning_rate)}`;
  }
  let shownBand = "";
  function showSpeed(o) {
    verdict.textContent = o.verdict || "";
    verdict.hidden = !o.verdict;
    tile.speed.box.title = Object.entries(o.parts_s || {}).map(([part, s]) => `${part}: ${+s.toPrecision(3)} s`).join("\n");
    verdict.classList.toggle("kit-slow", (o.verdict || "").startsWith("slower"));
    const known = o.goodput, parts = known ? known.parts : [], words = ({ part, share }) => `${part} ${(100 * share).toFixed(1)} %`;
    goodput.hidden = shares.hidden = !parts.length;
    const label = known ? `Goodput ${known.share == null ? "unknown" : (100 * known.share).toFixed(1) + " %"} of the device-hours. Of all time, waiting too: ` : "";
    goodput.setAttribute("aria-label", [label, ...parts.map(words)].join("; "));
    goodput.replaceChildren(...parts.map((p) => { const piece = make("span", "", null); piece.style.cssText = `flex:${p.share};background:${PARTS[p.part]}`; piece.title = `${words(p)}, ${duration(p.seconds)}: ${p.meaning}`; return piece; }));
    shares.replaceChildren(label, ...parts.filter((p) => p.share >= 0.001).sort((a, b) => b.share - a.share).slice(0, 6).map((p) => {
      const item = make("span", "", null);
      make("i", "", item).style.background = PARTS[p.part];
      item.append(words(p));
      return item;
    }));
    const band = JSON.stringify(o.band || null);
    if (band !== shownBand && state.plots.length) { shownBand = band; draw(); }
  }
  function showActions() {
    const f = state.facts, lines = [];
    for (const [action, text] of ACTIONS) {
      buttons[action].disabled = !(f.allowed || []).includes(action);
      buttons[action].hidden = action === "resume" ? !(f.allowed || []).includes(action) : !!f.final;
      const known = (f.actions || {})[action];
      if (known && 1000 * known.asked_at >= (state.asked[action] || 0) - 2000) {
        delete state.asked[action];
        let line = `${text}: asked ${clock(known.asked_at)}`;
        if (known.taken_at && !known.done_at) line += `, taken ${clock(known.taken_at)}`;
        line += known.done_at ? `, done ${clock(known.done_at)}: ${known.note}` : " …";
        lines.push(line);
      } else if (state.asked[action]) lines.push(`${text}: sent ${clock(state.asked[action] / 1000)}, waits for the kernel …`);
    }
    say(history, lines.join("   ·   "));
  }
  function showNotice() {
    const silent = Date.now() - state.heard > SILENT_AFTER_MS, stale = (silent || hasEnded()) && !state.facts.final && !pageNotice;
    root.classList.toggle("kit-stale", stale);
    say(notice, noticeInWords(silent && !state.facts.final));
  }
  function noticeInWords(silent) {
    const f = state.facts, since = duration((Date.now() - state.heard) / 1000);
    const skipped = f.skipped_lines ? `${whole(f.skipped_lines)} unreadable metric lines skipped` : "", remarks = [f.unreadable_note, skipped];
    if (pageNotice) return [pageNotice, ...remarks].filter(Boolean).join("; ");
    if (hasEnded()) return f.final
      ? "the kernel was restarted or has ended. To zoom or to resume, run this cell again."
      : "not live: the kernel was restarted or has ended. Run this cell again.";
    if (kernel() && kernel().connectionStatus !== "connected") return "not connected to the kernel. JupyterLab tries again by itself.";
    if (silent) return isBusy()
      ? `the kernel is busy with another cell and has sent nothing for ${since}. The picture continues by itself.`
      : knowsKernel ? `the kernel has sent nothing for ${since}. The picture continues by itself.`
      : `the kernel has sent nothing for ${since}. If it was restarted, run this cell again.`;
    if (state.frame.read < 1) return `reading the history: ${Math.round(100 * state.frame.read)} %`;
    if (state.frozen && !isBusy()) return `the kernel has not answered ${state.isUsers ? "your request" : "this view"} yet. If no cell runs, reload the page.`;
    if (state.frozen && state.isUsers) return "the kernel is busy with another cell. Your request is answered when that cell ends; the picture continues.";
    if (!f.final && state.beat.looked_s_ago > OLD_AFTER_S) return `the state is ${duration(state.beat.looked_s_ago)} old: the file system or the scheduler does not answer.`;
    if (f.as_of) return `as of ${f.as_of} ago: not connected`;
    if (f.failure) return `view: ${f.failure}`;
    return remarks.filter(Boolean).join("; ");
  }
  let shownAlerts = "";
  function onAlerts() {
    const all = model.get("alerts") || [], now = JSON.stringify([all, allAlerts]);
    if (now === shownAlerts) return; // Without this return, a screen reader would read unchanged alerts again, and a focused button would lose the focus.
    shownAlerts = now;
    root.dataset.alerts = all.length;
    alerts.replaceChildren(...(allAlerts ? all : all.slice(0, SHOWN_ALERTS)).map((alert) => {
      const item = make("li", "kit-" + alert.level);
      make("span", "", item, `${alert.level === "error" ? "✖" : "⚠"} step ${whole(alert.step)}: ${alert.message} `);
      const jump = make("button", "kit-link", item, "show");
      jump.type = "button";
      jump.setAttribute("aria-label", `show step ${alert.step} and its log lines`);
      jump.onclick = () => {
        view.axis = axisChoice.value = "step";
        zoom(Math.max(0, alert.step - 100), alert.step + 50);
        search.value = String(alert.step);
        askLog();
      };
      return item;
    }));
    if (all.length > SHOWN_ALERTS) {
      const more = make("button", "kit-link", make("li", "", alerts), allAlerts ? "fewer" : `all ${all.length} alerts`);
      more.type = "button";
      more.onclick = () => { allAlerts = !allAlerts; onAlerts(); };
    }
  }
  function onHeat() {
    const data = model.get("heat"), f = state.facts, ranks = f.ranks || 1;
    rankFigure.hidden = ranks < 2 || !data || !data.byteLength;
    low.classList.toggle("kit-one", rankFigure.hidden);
    if (rankFigure.hidden) return;
    const rows = Math.ceil(ranks / (f.ranks_per_row || 1)), samples = data.byteLength / rows;
    heat.width = samples;
    heat.height = rows;
    heat.style.height = Math.min(176, Math.max(48, rows * 14)) + "px";
    const context = heat.getContext("2d"), image = context.createImageData(samples, rows);
    const ends = HEAT[state.dark ? "dark" : "light"];
    const shade = (value) => { // Returns the colour of a value from 0 to 254.
      const v = value / 127, [a, b] = v < 1 ? [ends[0], ends[1]] : [ends[1], ends[2]], share = v < 1 ? v : v - 1;
      return a.map((c, k) => Math.round(c + (b[k] - c) * share));
    };
    for (let i = 0; i < data.byteLength; i++) {
      const value = data.getUint8(i);
      if (value === 255) continue; // An unknown step time stays transparent.
      image.data.set([...shade(value), 255], 4 * i);
    }
    context.putImageData(image, 0, 0);
    rankTitle.textContent = "Step time by rank, over the median";
    rankScale.textContent = `rank 0 (top) to ${ranks - 1}${f.ranks_per_row > 1 ? `, a row is the slowest of ${f.ranks_per_row}` : ""}, the last ${samples} heartbeat${samples > 1 ? "s" : ""}; 0.8 × light to 1.4 × warm. ` + (f.straggler ? "Slowest: " + f.straggler : "");
    heat.setAttribute("aria-label", f.straggler || "no rank is known to be slow");
    showSplit(f.split || []);
  }
  function showSplit(told) { // Shows how long each part of a step takes, by rank.
    const total = (row) => row.seconds.reduce((a, b) => a + b, 0), longest = Math.max(...told.map(total)), names = Object.keys(STEP_PARTS);
    const words = (row, i) => `${names[i]} ${+row.seconds[i].toPrecision(3)} s`;
    split.hidden = !told.length;
    const legend = make("caption", "kit-muted", null, "A step by its parts, of the ranks that work longest");
    for (const name of names) make("i", "", make("span", "", legend, name)).style.background = STEP_PARTS[name];
    split.replaceChildren(legend, ...told.map((row) => {
      const line = make("tr", "", null), label = make("th", "", line, `rank ${row.rank}`), bar = make("div", "kit-goodput", make("td", "", line));
      label.title = row.host || "";
      bar.style.width = `${(100 * total(row)) / longest}%`;
      names.forEach((name, i) => { const piece = make("span", "", bar); piece.style.cssText = `flex:${1e6 * row.seconds[i]};background:${STEP_PARTS[name]}`; piece.title = words(row, i); });
      make("td", "kit-muted", line, words(row, names.length - 1));
      return line;
    }));
  }
  function showLog() {
    log.textContent = model.get("log") || (search.value ? `no line with “${search.value}”` : "no output yet");
    if (follow.checked) log.scrollTop = log.scrollHeight;
  }

  root.onkeydown = (event) => {
    const keys = { Escape: () => [null, null] };
    if (state.rows && document.activeElement.classList.contains("kit-plot")) {
      const x = state.rows[0], a = view.start ?? x[0], b = view.end ?? x[x.length - 1], w = b - a;
      Object.assign(keys, { "+": () => [a + w / 4, b - w / 4], "=": () => [a + w / 4, b - w / 4], "-": () => [a - w / 2, b + w / 2], ArrowLeft: () => [a - w / 5, b - w / 5], ArrowRight: () => [a + w / 5, b + w / 5] });
    }
    if (keys[event.key]) { event.preventDefault(); zoom(...keys[event.key]()); }
    event.stopPropagation(); // Otherwise the notebook would execute letters and arrows as its commands.
  };

  const drawFrame = () => later(onFrame);
  const handlers = {
    "change:frame": drawFrame, "change:window": drawFrame, "change:facts": () => { onFacts(); onHeat(); }, "change:alerts": onAlerts, "change:metrics": () => showCharts(),
    "change:heat": onHeat, "change:log": showLog, "change:settings": onSettings, "change:notes": onNotes, "msg:custom": onMessage,
  };
  for (const [event, handler] of Object.entries(handlers)) model.on(event, handler);
  // `fit` is also called once per second. The theme may change while the page has no layout, and then no observer sees the size of the charts.
  const fit = () => state.plots.forEach((plot, i) => { const wanted = size(hosts[i], i); if (hosts[i].plot.clientWidth && plot.width !== wanted.width) plot.setSize(wanted); });
  const resize = () => {
    fit();
    const width = numPixels();
    if (width && width !== asked) { asked = width; ask(false); }
  };
  let asked = 0;
  const sizes = new ResizeObserver(() => later(resize));
  sizes.observe(root);
  const retheme = () => { if (isDark(root) !== state.dark) { build(); onHeat(); showRuns(); } };
  const themes = new MutationObserver(() => later(retheme)); // The theme is read in the next frame, when the page has the styles and the layout of the new theme.
  themes.observe(document.body, { attributes: true });
  const timer = setInterval(() => { showNotice(); fit(); }, 1000);
  requestAnimationFrame(() => { showCharts(); onFrame(); onFacts(); onAlerts(); onHeat(); showLog(); onSettings(); onNotes(); });
  return () => {
    clearInterval(timer);
    clearTimeout(busyTimer);
    sizes.disconnect();
    themes.disconnect();
    for (const [event, handler] of Object.entries(handlers)) model.off(event, handler);
    firstKernel?.statusChanged?.disconnect(onKernelStatus);
    state.plots.forEach((plot) => plot.destroy());
  };
}

export default { render };
