// Functions of the dashboard that write numbers, place ticks, and unpack the numbers from the kernel. The kernel puts this file before dashboard.js.

function short(v, significantDigits = 3) {
  if (v == null || !isFinite(v)) return "–";
  const a = Math.abs(v);
  if (a >= 1e15) return v.toExponential(0);
  for (const [size, unit] of [[1e12, " T"], [1e9, " G"], [1e6, " M"], [1e3, " k"]])
    if (a >= size) return +(v / size).toPrecision(significantDigits) + unit;
  return String(+v.toPrecision(significantDigits));
}
// Returns a loss as text: with three decimals, or with four digits and an exponent if it would not fit into a tile.
function loss(v) { return Math.abs(v) < 1e4 ? v.toFixed(3) : v.toExponential(3); }
function rate(v) { return v === 0 ? "0" : v >= 0.1 && v < 1000 ? String(+v.toPrecision(3)) : v.toExponential(2); }
function norm(v) { return Math.abs(v) < 1e6 ? String(+v.toPrecision(3)) : v.toExponential(2); }
function bytes(v) { return v >= 2 ** 30 ? +(v / 2 ** 30).toPrecision(3) + " GiB" : +(v / 2 ** 20).toPrecision(3) + " MiB"; }
function number(v) { const a = Math.abs(v); return a && (a >= 1e6 || a < 1e-3) ? v.toExponential(3) : String(+v.toPrecision(4)); }
function whole(v) { return v == null ? "–" : Math.round(v).toLocaleString("en"); }
function duration(s) {
  if (s == null || !isFinite(s)) return "–";
  const d = Math.floor(s / 86400), h = Math.floor((s % 86400) / 3600), m = Math.floor((s % 3600) / 60);
  return d ? `${d} d ${h} h` : h ? `${h} h ${m} min` : m ? (m < 10 ? `${m} min ${Math.floor(s % 60)} s` : `${m} min`) : `${s < 10 ? +s.toFixed(1) : Math.floor(s)} s`;
}
function clock(t) { return new Date(1000 * t).toTimeString().slice(0, 8); }
function axisValue(axis, v) { return axis === "time" ? duration(v) : axis === "tokens" ? short(v) : whole(v); }

// Returns tick positions: 1, 2 and 5 in each decade if a logarithmic axis spans about a decade or more, otherwise even steps of at least `least`.
function splits(low, high, log, most, least = 0) {
  if (!(high > low)) return [low];
  if (log && low > 0 && high / low > 8) {
    for (const digits of [[1, 2, 5], [1, 3], [1]]) {
      const found = [];
      for (let e = Math.floor(Math.log10(low)); e <= Math.log10(high); e++)
        for (const d of digits) { const v = d * 10 ** e; if (v >= low && v <= high) found.push(v); }
      if (found.length <= most || digits.length === 1) return found.filter((_, i) => i % Math.ceil(found.length / most) === 0);
    }
  }
  const raw = Math.max(least, (high - low) / most), size = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((d) => d * size).find((s) => s >= raw * 0.999);
  const found = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high * (1 + 1e-12); i++) found.push(+(i * step).toPrecision(12));
  return found;
}

// Returns columns [name, values] as the text of a CSV file. The names may come from another user, so an apostrophe before a name keeps a spreadsheet
// from reading it as a formula.
function csvText(columns) {
  const quoted = (name) => `"${(/^\s*[=+\-@]/.test(name) ? "'" : "") + name.replaceAll(/\p{C}/gu, "\ufffd").replaceAll('"', '""')}"`;
  const digits = (v, column) => (v == null ? "" : column ? +v.toPrecision(7) : v); // Column 0 has places in float64. All other columns are float32.
  const lines = columns[0][1].map((_, i) => columns.map(([, values], column) => digits(values[i], column)));
  return [columns.map(([name]) => quoted(name)), ...lines].map((line) => line.join(",") + "\n").join("");
}

// Returns the number of decimals with which all `values`, written with an exponent, differ.
function digits(values) { return [1, 2, 3].find((n) => new Set(values.map((v) => v?.toExponential(n))).size === values.length) ?? 4; }

// Returns the number of significant digits, at least 3, with which all `values` differ.
function significant(values) { return [3, 4, 5, 6, 7].find((n) => new Set(values.map((v) => v?.toPrecision(n))).size === new Set(values).size) ?? 8; }

// Returns tick positions as `splits` does. For bytes, the positions are round numbers of MiB or GiB.
function ticks(low, high, log, most, key) {
  const unit = !/_bytes$/.test(key) ? 1 : high >= 2 ** 30 ? 2 ** 30 : 2 ** 20;
  return splits(low / unit, high / unit, log, most).map((v) => v * unit);
}

// Returns the indices of the validation losses that are drawn as circles, at least 14 pixels apart, so that they do not hide the curve.
function apart(u, index) {
  const found = [];
  let last = -Infinity;
  u.data[index].forEach((v, i) => {
    if (v == null) return;
    const at = u.valToPos(u.data[0][i], "x");
    if (at - last >= 14) { found.push(i); last = at; }
  });
  return found;
}

// Returns the arrays that the kernel has sent as bytes: x in float64, then the rows in float32. NaN becomes null, which a chart draws as a gap.
function unpack(view, n) {
  if (!view || !view.byteLength || !n) return null;
  const buffer = view.buffer.slice(view.byteOffset, view.byteOffset + view.byteLength);
  const rows = [Array.from(new Float64Array(buffer, 0, n))];
  for (let at = 8 * n; at < buffer.byteLength; at += 4 * n)
    rows.push(Array.from(new Float32Array(buffer, at, n), (v) => (isFinite(v) ? v : null)));
  return rows;
}

function lastOf(values) {
  for (let i = values.length - 1; i >= 0; i--) if (values[i] != null) return values[i];
  return null;
}
