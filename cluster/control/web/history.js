// The last hour, a chart for each figure: GET /admin/v1/history.
import { $, headers, make, ms, percent } from "./draw.js";

const HOUR_S = 3600;
const number = (value) => (value === null || value === undefined ? "-" : String(Math.round(value * 10) / 10));
// Each chart: title, how a value is written, the upper end if it is fixed, and its lines by class of colour.
const CHARTS = [
  ["First token, p95", ms, null, [["ttft_p95_ms", "prefill", ""]], "ttft_ms"],
  ["Between tokens, p95", ms, null, [["itl_p95_ms", "decode", ""]], "itl_ms"],
  ["Goodput", percent, 1, [["goodput", "life", ""]]],
  ["Queue", number, null, [["prefill_queue", "prefill", "P "], ["decode_queue", "decode", "D "]]],
  ["KV in use", percent, 1, [["prefill_kv", "prefill", "P "], ["decode_kv", "decode", "D "]]],
  ["Prefix hits", percent, 1, [["prefix_hit", "prefill", ""]]],
  ["Workers", number, null, [["prefill_ready", "prefill", "P "], ["decode_ready", "decode", "D "]]],
];
const samples = { at: [], series: {}, interval: 10 };
let slo = {};

export async function remember(targets) {
  slo = targets;
  const answer = await fetch(`admin/v1/history?after=${samples.at.at(-1) ?? 0}`, { headers: headers() });
  if (!answer.ok) return;
  const told = await answer.json();
  samples.interval = told.interval_s;
  samples.at.push(...told.at);
  const late = samples.at.length - Math.ceil(HOUR_S / told.interval_s);
  if (late > 0) samples.at.splice(0, late);
  for (const [name, values] of Object.entries(told.series)) {
    const kept = (samples.series[name] ??= []);
    kept.push(...values);
    if (late > 0) kept.splice(0, late);
  }
  drawHistory();
}

function drawHistory() {
  $("history").replaceChildren(...CHARTS.map(chart));
  $("history-note").textContent = samples.at.length ? "" : "The first sample comes after ten seconds.";
}

function chart([title, write, end, lines, target]) {
  const [width, height, top, bottom] = [320, 96, 8, 78];
  const values = lines.flatMap(([name]) => samples.series[name] ?? []).filter((value) => value !== null);
  const highest = end ?? (Math.max(...values, 0) * 1.15 || 1);
  const last = samples.at.at(-1) ?? 0;
  const x = (at) => width - 4 - (width - 8) * Math.min(1, (last - at) / HOUR_S);
  const y = (value) => bottom - (bottom - top) * Math.min(1, value / highest);
  const now = lines.map(([name, , mark]) => `${mark}${write(samples.series[name]?.at(-1))}`).join("  ");
  const marks = [make("line", { x1: 4, x2: width - 4, y1: bottom, y2: bottom, stroke: "var(--line)" }),
    make("text", { x: 4, y: 93 }, "1 h ago"), make("text", { x: width - 4, y: 93, "text-anchor": "end" }, "now"),
  ];
  const scale = make("text", { x: 4, y: top + 8, class: "scale" }, write(highest));
  const goal = slo[target];
  if (goal && goal <= highest) marks.push(make("line", { x1: 4, x2: width - 4, y1: y(goal), y2: y(goal), class: "target" }, make("title", {}, "target")));
  return make("figure", { class: "chart" }, make("figcaption", {}, make("span", {}, title), make("b", {}, now)),
    make("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": `${title} in the last hour, now ${now}` },
      ...marks, ...lines.flatMap(([name, colour]) => runs(name).map((run) => (run.length > 1
        ? make("polyline", { class: `curve ${colour}`, points: run.map(([at, value]) => `${x(at).toFixed(1)},${y(value).toFixed(1)}`).join(" ") })
        : make("circle", { cx: x(run[0][0]), cy: y(run[0][1]), r: 2.5, class: colour })))), scale));
}

// A line is broken where nothing was measured, and where Control was away.
function runs(name) {
  const found = [];
  let run = [];
  (samples.series[name] ?? []).forEach((value, index) => {
    const at = samples.at[index];
    const gap = run.length && at - run.at(-1)[0] > 3 * samples.interval;
    if (value === null || gap) { if (run.length) found.push(run); run = []; }
    if (value !== null) run.push([at, value]);
  });
  return run.length ? [...found, run] : found;
}
