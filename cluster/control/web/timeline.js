// The life of one request, from what its decision predicted and what was observed since.
import { make, ms } from "./draw.js";

const LEFT = 74;
const LANE = 26;

// The phases as far as they are known, in seconds from the request's arrival.
export function phases(one) {
  const began = one.waited_s + one.left_s;
  const observed = one.observed;
  const predicted = began + one.prefill_s;
  const first = observed.ttft_ms === undefined ? predicted : observed.ttft_ms / 1e3;
  const list = [["router", "queue", "in the router's queue", 0, Math.min(one.waited_s, first)]];
  if (one.kind === "refused") return { list, first: null };
  const start = Math.min(began, first);
  list.push(["prefill", "left", "behind other prompts (predicted)", Math.min(one.waited_s, first), start]);
  list.push(["prefill", "compute", "prefill (predicted)", start, Math.min(predicted, first)]);
  if (first > predicted) list.push(["prefill", "rest", "until the observed first token", predicted, first]);
  const exposed = observed.exposed_ms === undefined ? one.exposed_s : observed.exposed_ms / 1e3;
  if (one.prefill) {
    const arrived = first + exposed;
    const took = observed.transfer_ms === undefined ? exposed : observed.transfer_ms / 1e3;
    const how = observed.transfer_ms === undefined ? "what prefill does not hide of the transfer (predicted)" : `KV transfer, ${ms(exposed * 1e3)} of it not hidden`;
    list.push(["transfer", "life", how, Math.max(0, arrived - took), arrived]);
  }
  if (observed.tokens > 1) {
    const decode = first + exposed;
    list.push(["decode", "decode", `decode, ${observed.tokens} tokens (at the predicted ITL)`, decode, decode + (observed.tokens - 1) * one.itl_s]);
  }
  return { list: list.filter(([, , , from, to]) => to > from), first };
}

export function timeline(one, width) {
  const { list, first } = phases(one);
  const lanes = [...new Set(list.map(([lane]) => lane))];
  const end = Math.max(...list.map(([, , , , to]) => to), first ?? 0, 1e-3);
  const x = (seconds) => LEFT + ((width - LEFT - 8) * seconds) / end;
  const height = lanes.length * LANE + 22;
  const bars = list.map(([lane, colour, name, from, to]) => make("rect", { x: x(from), y: lanes.indexOf(lane) * LANE + 4,
    width: Math.max(1.5, x(to) - x(from)), height: LANE - 10, rx: 2, class: colour }, make("title", {}, `${name}: ${ms((to - from) * 1e3)}`)));
  const labels = lanes.map((lane, index) => make("text", { x: 0, y: index * LANE + 17 }, lane));
  const marks = [make("text", { x: width - 8, y: height - 4, "text-anchor": "end" }, ms(end * 1e3))];
  if (first !== null) {
    marks.push(make("line", { x1: x(first), x2: x(first), y1: 0, y2: height - 18, class: "first" }));
    // Beside the mark, unless the end's label is there.
    if (x(first) < width - 220) marks.push(make("text", { x: x(first) - 2, y: height - 4 }, `first token ${ms(first * 1e3)}`));
  }
  const target = one.ttft_target_s;
  if (target <= end) marks.push(make("line", { x1: x(target), x2: x(target), y1: 0, y2: height - 18, class: "target" }, make("title", {}, "target of the first token")));
  const svg = make("svg", { viewBox: `0 0 ${width} ${height}`, width, height, role: "img", class: "timeline",
    "aria-label": `Life of the request: ${list.map(([, , name, from, to]) => `${name} ${ms((to - from) * 1e3)}`).join(", ")}` }, ...labels, ...bars, ...marks);
  return make("figure", {}, svg, make("ul", { class: "phases" }, ...list.map(([, colour, name, from, to]) =>
    make("li", {}, make("span", { class: `key ${colour}` }), ` ${name} `, make("b", {}, ms((to - from) * 1e3))))));
}
