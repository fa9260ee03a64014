// Shows the dashboard in a page that `kit watch --html` has written. The kit puts this file after dashboard.js. The page contains all numbers,
// and this file takes the place of the kernel: it answers each message with the numbers of the wanted x axis.
{
  const page = JSON.parse(document.getElementById("kit-data").textContent);
  const decode = (text) => Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
  const rows = decode(page.rows), values = { ...page.values, heat: new DataView(decode(page.heat).buffer) }, listeners = {};
  let axis = "step";
  const answer = (heard) => {
    const x = decode(page.places[axis]), both = new Uint8Array(x.length + rows.length);
    both.set(x);
    both.set(rows, x.length);
    values.frame = { ...page.frames[axis], heard };
    values.window = new DataView(both.buffer);
    (listeners["change:frame"] || []).forEach((listener) => listener());
  };
  const model = {
    get: (key) => values[key],
    on: (event, listener) => { (listeners[event] ??= []).push(listener); },
    off: () => {},
    send: (message) => { axis = message.axis ?? axis; answer(message.number); },
  };
  answer(0);
  render({ model, el: document.getElementById("view") });
  // The dashboard looks for another theme when an attribute of the body changes.
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", ({ matches }) => { document.body.dataset.theme = matches ? "dark" : "light"; });
}
