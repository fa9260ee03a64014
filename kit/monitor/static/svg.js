// Writes a chart of the dashboard as the text of an SVG file. The file needs no other file, and its colours follow the theme of its reader.
// The kernel puts this file before dashboard.js.

const SVG_SIZE = { width: 900, height: 460, left: 76, right: 24, bottom: 34, line: 18 };

// Returns the SVG text of a chart. Each curve and the band have [light, dark] colours. Scales are uPlot's: min, max and distr, which is 3 if the scale is logarithmic.
function svgText({ title, x, curves, band, dots, dotsLabel, levels, attempts, xScale, yScale, xTicks, yTicks }) {
  const { width, height, left, right, bottom, line } = SVG_SIZE, top = 34 + line * (curves.length + (dots ? 1 : 0));
  const escaped = (text) => String(text).replaceAll(/\p{C}/gu, "\ufffd").replaceAll(/[&<>"']/g, (letter) => `&#${letter.codePointAt(0)};`);
  const share = ({ min, max, distr }, v) => (distr === 3 ? (v > 0 ? Math.log(v / min) / Math.log(max / min) : NaN) : (v - min) / (max - min));
  const placeX = (v) => left + share(xScale, v) * (width - left - right), placeY = (v) => height - bottom - share(yScale, v) * (height - top - bottom);
  const point = (v, i) => `${placeX(x[i]).toFixed(1)} ${placeY(v).toFixed(1)}`;
  const isDrawn = (v, i) => v != null && isFinite(placeX(x[i])) && isFinite(placeY(v));
  const path = (values) => values.map((v, i) => (isDrawn(v, i) ? (i && isDrawn(values[i - 1], i - 1) ? "L" : "M") + point(v, i) : "")).join("");
  const pairs = [], coloured = (colours) => `class="c${pairs.push(colours) - 1}"`;
  const text = (words, at, y, extra = "") => `<text x="${at.toFixed(1)}" y="${y.toFixed(1)}" ${extra}>${escaped(words)}</text>`;
  const rule = (x1, y1, x2, y2, name) => `<path class="${name}" d="M${x1.toFixed(1)} ${y1.toFixed(1)}L${x2.toFixed(1)} ${y2.toFixed(1)}"/>`;
  const parts = [], legend = [];
  for (const [v, words] of xTicks) parts.push(rule(placeX(v), top, placeX(v), height - bottom, "grid"), text(words, placeX(v), height - bottom + 18, 'text-anchor="middle"'));
  for (const [v, words] of yTicks) parts.push(rule(left, placeY(v), width - right, placeY(v), "grid"), text(words, left - 8, placeY(v) + 4, 'text-anchor="end"'));
  const drawn = [];
  if (band) { // Each pixel of the chart is a vertical stroke from its least to its largest value.
    const strokes = band.low.map((v, i) => (isDrawn(v, i) && isDrawn(band.high[i], i) ? `M${point(v, i)}L${point(band.high[i], i)}` : "")).join("");
    drawn.push(`<g ${coloured(band.colours)}><path class="pale" d="${path(band.high)}${strokes}"/></g>`);
  }
  curves.forEach(({ label, colours, values, width: stroke, dash }, k) => {
    const style = `stroke-width="${stroke}"${dash ? ` stroke-dasharray="${dash.join(" ")}"` : ""}`, y = 48 + line * k;
    drawn.push(`<g ${coloured(colours)}><path class="curve" ${style} d="${path(values)}"/></g>`);
    legend.push(`<g ${coloured(colours)}><path class="curve" ${style} d="M${left} ${y - 4}h28"/></g>`, text(label, left + 36, y));
  });
  if (dots) {
    dots.forEach((v, i) => { if (isDrawn(v, i)) drawn.push(`<circle class="dot" cx="${placeX(x[i]).toFixed(1)}" cy="${placeY(v).toFixed(1)}" r="3"/>`); });
    const y = 48 + line * curves.length;
    legend.push(`<circle class="dot" cx="${left + 14}" cy="${y - 4}" r="3"/>`, text(dotsLabel, left + 36, y));
  }
  for (const [label, v] of Object.entries(levels)) if (share(yScale, v) >= 0 && share(yScale, v) <= 1) drawn.push(rule(left, placeY(v), width - right, placeY(v), "mark"), text(`${label} ${v.toFixed(2)}`, width - right, placeY(v) - 5, 'text-anchor="end"'));
  for (const { attempt, x: v } of attempts) if (share(xScale, v) >= 0 && share(xScale, v) <= 1) drawn.push(rule(placeX(v), top, placeX(v), height - bottom, "mark"), text(`attempt ${attempt}`, placeX(v) + 4, top + 12));
  // Programs other than browsers know neither variables of CSS nor themes. They show the light colours, which are written out.
  const theme = (k, ink, faint, ground) => `text{fill:${ink}}.ground{fill:${ground}}.grid{stroke:${faint}}.mark{stroke:${ink}}.dot{fill:${ground};stroke:${ink}}` + pairs.map((pair, i) => `.c${i} path{stroke:${pair[k]}}`).join("");
  const css = `svg{font:12px system-ui,sans-serif}path{fill:none}.title{font-size:14px;font-weight:600}.mark{stroke-dasharray:6 4}.dot{stroke-width:1.5}.pale{stroke-opacity:.35}${theme(0, "#505050", "#e6e6e6", "#fff")}@media(prefers-color-scheme:dark){${theme(1, "#c4c4c4", "#3a3a3a", "#1e1e1e")}}`;
  const box = [left, top, width - left - right, height - top - bottom]; // An inner <svg> hides what is drawn outside of its box.
  const inside = `<svg x="${box[0]}" y="${box[1]}" width="${box[2]}" height="${box[3]}" viewBox="${box.join(" ")}">`;
  return `<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 ${width} ${height}" width="${width}" height="${height}"><style>${css}</style>`
    + `<rect class="ground" width="${width}" height="${height}"/>${text(title, left, 26, 'class="title"')}${legend.join("")}${parts.join("")}${inside}${drawn.join("")}</svg></svg>\n`;
}
