// What every view draws with.
export const $ = (id) => document.getElementById(id);
const SVG = "http://www.w3.org/2000/svg";

// Text is always set as text, never as markup.
export function make(name, attributes = {}, ...children) {
  const svg = ["svg", "g", "rect", "path", "text", "circle", "title", "line", "polyline"].includes(name);
  const node = svg ? document.createElementNS(SVG, name) : document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  node.append(...children.map((child) => (child instanceof Node ? child : String(child))));
  return node;
}
export const cell = (value, number = false) => make("td", number ? { class: "number" } : {}, value);
export const row = (...cells) => make("tr", {}, ...cells);
export const percent = (share) => (share === null || share === undefined ? "-" : `${(100 * share).toFixed(1)} %`);
export const ms = (value) => (value === null || value === undefined ? "-" : `${value.toFixed(value < 10 ? 1 : 0)} ms`);
export const bytes = (value) => {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  while (value >= 1024 && unit < 4) { value /= 1024; unit += 1; }
  return `${value.toFixed(value < 10 && unit ? 1 : 0)} ${units[unit]}`;
};

export function table(id, head, rows) {
  const caption = $(id).caption;
  $(id).replaceChildren(...(caption ? [caption] : []),
    make("thead", {}, make("tr", {}, ...head.map((name, column) =>
      make("th", { class: rows[0]?.cells[column]?.className === "number" ? "number" : "" }, name)))),
    make("tbody", {}, ...rows.map((shown) => labelled(shown, head))));
}

// On a narrow screen a row is a card, and each cell says which column it is of.
function labelled(shown, head) {
  [...shown.cells].forEach((cell, column) => { cell.dataset.label = head[column] ?? ""; });
  return shown;
}

export function headers() {
  const key = sessionStorage.getItem("diptych-key");
  return key ? { authorization: `Bearer ${key}` } : {};
}
