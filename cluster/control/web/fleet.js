// Workers as boxes, prefill left and decode right, and lines where KV moves between them.
import { $, bytes, make, percent } from "./draw.js";

const NARROW = 620; // in CSS pixels: below it, and of more workers than ROOMY on a side, boxes are small
const ROOMY = 12;
const LINES_LIMIT = 96; // more lines are a grey field: then only those that move are drawn
const LABELS_LIMIT = 10;
let drawn = { workers: [], before: [] };

export function drawFleet(workers, before) {
  drawn = { workers, before };
  const width = Math.max(300, Math.floor($("fleet").parentElement.clientWidth));
  const sides = { prefill: [], decode: [] };
  for (const worker of workers) (sides[worker.role || worker.home] ?? sides.decode).push(worker);
  for (const side of Object.values(sides)) side.sort((a, b) => a.id.localeCompare(b.id));
  const most = Math.max(sides.prefill.length, sides.decode.length, 1);
  const shape = width < NARROW || most > ROOMY ? smallShape(width, sides) : largeShape(width, most);

  const places = new Map();
  const boxes = [];
  for (const [role, side] of Object.entries(sides)) {
    boxes.push(make("text", { x: shape.left[role], y: 14, class: "strong" }, `${role}: ${side.length}`));
    side.forEach((worker, index) => {
      const x = shape.left[role] + (index % shape.columns) * (shape.boxWidth + 6);
      const y = 22 + Math.floor(index / shape.columns) * (shape.boxHeight + 8);
      places.set(worker.id, { x: role === "prefill" ? x + shape.boxWidth : x, y: y + shape.boxHeight / 2 });
      boxes.push((shape.small ? smallBox : largeBox)(worker, role, x, y, shape.boxWidth));
    });
  }
  const rows = Math.ceil(most / shape.columns);
  const height = 26 + rows * (shape.boxHeight + 8);
  for (const [name, value] of [["viewBox", `0 0 ${width} ${height}`], ["width", width], ["height", height]]) $("fleet").setAttribute(name, value);
  $("fleet").replaceChildren(...lines(workers, places, width), ...boxes);
}

function largeShape(width, most) {
  const boxWidth = Math.min(300, Math.floor((width - 130) / 2));
  return { small: false, columns: 1, boxWidth, boxHeight: 44, left: { prefill: 0, decode: width - boxWidth } };
}

// The middle is left to the lines; both sides have boxes of the same size, in as many columns as fit.
function smallShape(width, sides) {
  const half = Math.floor((width - Math.max(40, width * 0.14)) / 2);
  const columns = Math.max(1, Math.floor((half + 6) / 78));
  const boxWidth = Math.floor((half + 6) / columns) - 6;
  return { small: true, columns, boxWidth, boxHeight: 34, left: { prefill: 0, decode: width - half } };
}

function load(worker) {
  const engine = worker.engine;
  const blocks = engine.kv_blocks;
  const used = blocks.total ? (blocks.active + blocks.reserved) / blocks.total : 0;
  return {
    running: engine.running + engine.ready + engine.prefilling + engine.waiting,
    used,
    held: blocks.total ? used + blocks.cached / blocks.total : 0,
  };
}

function title(worker, now) {
  return make("title", {}, `${worker.id}, ${worker.state}, pid ${worker.pid}, ${now.running} sequences, KV ${percent(now.used)} in use`);
}

function frame(worker, x, y, width, height) {
  return make("rect", { x, y, width, height, rx: 6, class: worker.state === "ready" ? "box" : "box changing" });
}

function meter(role, now, x, y, width) {
  return [
    make("rect", { x, y, width, height: 6, rx: 3, fill: "var(--line)" }),
    make("rect", { x, y, width: width * now.held, height: 6, rx: 3, class: role, opacity: 0.45 }),
    make("rect", { x, y, width: width * now.used, height: 6, rx: 3, class: role }),
  ];
}

function largeBox(worker, role, x, y, width) {
  const now = load(worker);
  const state = worker.state === "ready" ? "" : ` ${worker.state}`;
  return make("g", {}, title(worker, now), frame(worker, x, y, width, 44),
    make("rect", { x, y, width: 6, height: 44, rx: 3, class: role }),
    make("text", { x: x + 16, y: y + 18, class: "strong" }, `${worker.id}${state}`),
    make("text", { x: x + width - 10, y: y + 18, "text-anchor": "end" }, `${now.running} running`),
    ...meter(role, now, x + 16, y + 29, width - 110),
    make("text", { x: x + width - 10, y: y + 36, "text-anchor": "end" }, `KV ${percent(now.used)}`));
}

function smallBox(worker, role, x, y, width) {
  const now = load(worker);
  const name = worker.id.split("/").pop().slice(0, 4);
  return make("g", {}, title(worker, now), frame(worker, x, y, width, 34),
    make("text", { x: x + 6, y: y + 15, class: "strong" }, name),
    make("text", { x: x + width - 6, y: y + 15, "text-anchor": "end" }, now.running),
    ...meter(role, now, x + 6, y + 22, width - 12));
}

function lines(workers, places, width) {
  const last = new Map(drawn.before.map((worker) => [worker.id, worker.transfer.received_from ?? {}]));
  const found = [];
  for (const worker of workers) {
    for (const [source, total] of Object.entries(worker.transfer.received_from ?? {})) {
      const [from, to] = [places.get(source), places.get(worker.id)];
      if (!total || !from || !to) continue;
      const moved = Math.max(0, total - (last.get(worker.id)?.[source] ?? total));
      found.push({ source, target: worker.id, total, moved, from, to });
    }
  }
  const moving = found.filter((one) => one.moved);
  const shown = found.length > LINES_LIMIT ? moving : found;
  const labels = moving.length > LABELS_LIMIT ? [] : moving.map((one) =>
    make("text", { x: (one.from.x + one.to.x) / 2, y: (one.from.y + one.to.y) / 2 + 4, "text-anchor": "middle", class: "rate" }, `${bytes(one.moved)}/s`));
  return [...shown.map((one) => line(one, width)), ...labels];
}

function line({ source, target, total, moved, from, to }, width) {
  const middle = width / 2;
  const bend = from.x === to.x ? from.x + (from.x < middle ? 70 : -70) : (from.x + to.x) / 2;
  return make("path", { d: `M ${from.x} ${from.y} C ${bend} ${from.y} ${bend} ${to.y} ${to.x} ${to.y}`, fill: "none",
    class: moved ? "moving" : "moved", "stroke-width": moved ? Math.min(8, 1.5 + Math.log2(1 + moved / 65536)) : 1 },
  make("title", {}, `${source} -> ${target}: ${bytes(moved)} in the last second, ${bytes(total)} in all`));
}

new ResizeObserver(() => { if (drawn.workers.length) drawFleet(drawn.workers, drawn.before); }).observe($("fleet").parentElement);
