// The live page: reads /admin/v1/events (server-sent events over fetch, so that a key can go along).
import { $, bytes, cell, headers, make, ms, percent, row, table } from "./draw.js";
import { offer } from "./whatif.js";

const KEPT = 60;
const decisions = new Map();
const actions = [];
let before = null;
let opened = null;

function dial(share) {
  const at = (part) => {
    const angle = Math.PI * (1 - part);
    return `${100 + 80 * Math.cos(angle)} ${100 - 80 * Math.sin(angle)}`;
  };
  const arc = (part, colour) => make("path", { d: `M ${at(0)} A 80 80 0 0 1 ${at(part)}`, fill: "none",
    stroke: colour, "stroke-width": 16 });
  const shown = share ?? 0;
  const colour = shown >= 0.99 ? "var(--good)" : shown >= 0.9 ? "var(--late)" : "var(--bad)";
  $("dial").replaceChildren(arc(1, "var(--line)"), ...(share ? [arc(shown, colour)] : []),
    make("text", { x: 100, y: 92, "text-anchor": "middle", class: "big" }, percent(share)));
}

// ---- cluster ----

function drawCluster(now) {
  $("state").textContent = now.state + (now.missing.length ? `: no ${now.missing.join(", ")}` : "");
  $("state").className = `pill ${now.state}`;
  $("model").textContent = now.model ?? "";
  const goodput = now.router?.goodput ?? { share: null, requests: 0, classes: {} };
  dial(goodput.share);
  $("dial-note").textContent = `${goodput.requests} requests, ttft <= ${now.slo.ttft_ms} ms, itl <= ${now.slo.itl_ms} ms`;
  table("classes", ["Class", "Requests", "Both", "TTFT", "ITL"], Object.entries(goodput.classes).map(
    ([name, one]) => row(cell(name), cell(one.requests, true), cell(percent(one.share), true),
      cell(percent(one.ttft), true), cell(percent(one.itl), true))));
  $("requests-now").replaceChildren(...Object.entries(now.requests).flatMap(([name, n]) =>
    [make("div", {}, make("dd", {}, n), make("dt", {}, name))]));
  table("pools", ["Pool", "Ready", "GPU", "Queue", "Running", "KV used", "Prefix hit", "P95 TTFT", "P95 ITL", "Note"],
    Object.entries(now.pools).map(([name, pool]) => row(cell(name), cell(`${pool.ready}/${pool.target}`),
      cell(pool.gpu), cell(pool.queue, true), cell(pool.running, true), cell(percent(pool.kv_used), true),
      cell(percent(pool.prefix_hit), true), cell(ms(pool.ttft_p95_ms), true), cell(ms(pool.itl_p95_ms), true),
      make("td", { class: "note" }, pool.notes.join("; ")))));
  drawFleet(now.workers);
  offer(now);
  before = now;
}

function drawFleet(workers) {
  const sides = { prefill: [], decode: [] };
  for (const worker of workers) (sides[worker.role || worker.home] ?? sides.decode).push(worker);
  const height = 52;
  const tall = Math.max(sides.prefill.length, sides.decode.length, 1) * height + 10;
  $("fleet").setAttribute("viewBox", `0 0 900 ${tall}`);
  const places = new Map();
  const boxes = [];
  for (const [role, mine] of Object.entries(sides)) {
    mine.sort((a, b) => a.id.localeCompare(b.id)).forEach((worker, index) => {
      const x = role === "prefill" ? 10 : 610;
      const y = index * height + 5;
      places.set(worker.id, { x: role === "prefill" ? x + 280 : x, y: y + 21 });
      boxes.push(box(worker, role, x, y));
    });
  }
  $("fleet").replaceChildren(...arcs(workers, places), ...boxes);
}

function box(worker, role, x, y) {
  const blocks = worker.engine.kv_blocks;
  const used = (blocks.active + blocks.reserved) / blocks.total;
  const held = used + blocks.cached / blocks.total;
  const state = worker.state === "ready" ? "" : ` ${worker.state}`;
  const engine = worker.engine;
  const doing = engine.running + engine.ready + engine.prefilling + engine.waiting;
  return make("g", {},
    make("title", {}, `${worker.id}, pid ${worker.pid}, ${doing} sequences, KV ${percent(used)} in use`),
    make("rect", { x, y, width: 280, height: 42, rx: 6, fill: "var(--soft)", stroke: "var(--line)" }),
    make("rect", { x, y, width: 6, height: 42, rx: 3, class: role }),
    make("text", { x: x + 16, y: y + 18, class: "strong" }, `${role === "prefill" ? "P" : "D"}  ${worker.id}${state}`),
    make("text", { x: x + 270, y: y + 18, "text-anchor": "end" }, `${doing} running`),
    make("rect", { x: x + 16, y: y + 28, width: 180, height: 6, rx: 3, fill: "var(--line)" }),
    make("rect", { x: x + 16, y: y + 28, width: 180 * held, height: 6, rx: 3, class: role, opacity: 0.45 }),
    make("rect", { x: x + 16, y: y + 28, width: 180 * used, height: 6, rx: 3, class: role }),
    make("text", { x: x + 270, y: y + 35, "text-anchor": "end" }, `KV ${percent(used)}`));
}

function arcs(workers, places) {
  const last = new Map((before?.workers ?? []).map((worker) => [worker.id, worker.transfer.received_from ?? {}]));
  const [lines, labels] = [[], []];
  for (const worker of workers) {
    for (const [source, total] of Object.entries(worker.transfer.received_from ?? {})) {
      const moved = Math.max(0, total - (last.get(worker.id)?.[source] ?? total));
      const [from, to] = [places.get(source), places.get(worker.id)];
      if (!total || !from || !to) continue;
      const bend = from.x === to.x ? from.x + (from.x < 450 ? 90 : -90) : 450;
      lines.push(make("path", { d: `M ${from.x} ${from.y} C ${bend} ${from.y} ${bend} ${to.y} ${to.x} ${to.y}`, fill: "none",
        class: moved ? "moving" : "moved", "stroke-width": moved ? Math.min(10, 1.5 + Math.log2(1 + moved / 65536)) : 1 },
      make("title", {}, `${source} -> ${worker.id}: ${bytes(moved)} in the last second, ${bytes(total)} in all`)));
      if (moved) labels.push(make("text", { x: (from.x + to.x) / 2, y: (from.y + to.y) / 2 + 4, "text-anchor": "middle", class: "rate" },
        `${bytes(moved)}/s`));
    }
  }
  return [...lines, ...labels];
}

// ---- requests ----

const taken = (one) => Math.max(one.waited_s + one.left_s + one.prefill_s, (one.observed.ttft_ms ?? 0) / 1e3);

function waterfall(one, longest) {
  const seen = one.observed.ttft_ms ? one.observed.ttft_ms / 1e3 : 0;
  const parts = [["queue", one.waited_s], ["left", one.left_s], ["compute", one.prefill_s]];
  const told = parts.reduce((sum, [, seconds]) => sum + seconds, 0);
  parts.push(["rest", Math.max(0, seen - told)]);
  const scale = 160 / longest;
  let x = 0;
  const bars = parts.map(([name, seconds]) => {
    const bar = make("rect", { x, y: 3, width: Math.max(0, seconds * scale), height: 10, class: name },
      make("title", {}, `${name} ${ms(seconds * 1e3)}`));
    x += seconds * scale;
    return bar;
  });
  const target = one.ttft_target_s * scale;
  const mark = target <= 165 ? [make("line", { x1: target, x2: target, y1: 0, y2: 16, stroke: "var(--ink)" })] : [];
  return make("svg", { width: 170, height: 16, role: "img", "aria-label": `first token, target ${ms(one.ttft_target_s * 1e3)}` },
    ...bars, ...mark);
}

function drawRequests() {
  const list = [...decisions.values()].sort((a, b) => b.number - a.number).slice(0, KEPT);
  const longest = Math.max(1e-3, ...list.map(taken)); // of all rows: their bars compare
  $("decisions").tBodies[0].replaceChildren(...list.flatMap((one) => {
    const late = one.observed.ttft_ms > one.ttft_target_s * 1e3;
    const name = one.key[0].split("~")[0];
    const shown = row(make("td", { class: "name" }, name),
      cell(one.prompt_tokens, true), cell(one.hit_tokens, true),
      make("td", { class: "route" }, one.kind === "refused" ? `refused: ${one.note}` : route(one)),
      make("td", {}, waterfall(one, longest)), cell(ms(one.ttft_s * 1e3), true),
      make("td", { class: late ? "number missed" : "number" }, ms(one.observed.ttft_ms)), cell((one.observed.reason ?? "") + (one.key[1] ? `, try ${one.key[1] + 1}` : "")));
    shown.title = name;
    shown.tabIndex = 0;
    if (opened === one.number) shown.className = "open";
    const open = () => { opened = opened === one.number ? null : one.number; drawRequests(); };
    shown.addEventListener("click", open);
    shown.addEventListener("keydown", (event) => { if (event.key === "Enter") open(); });
    if (opened !== one.number) return [shown];
    return [shown, make("tr", { class: "open" }, make("td", { colspan: 8, id: "explain" }, ...explained(one)))];
  }));
}

const route = (one) => [one.prefill, one.decode].filter(Boolean).join(" \u2192 ");

function explained(one) {
  const options = (stage) => {
    const all = one[`${stage}_options`];
    if (!all.length) return make("p", {}, `${stage}: none`);
    const terms = Object.keys(all[0][2]);
    return make("table", {}, make("caption", {}, `${stage}: candidates, the chosen one first`),
      make("thead", {}, row(...["Worker", "Score", ...terms].map((name, column) => make("th", { class: column ? "number" : "" }, name)))),
      make("tbody", {}, ...all.map(([worker, score, cost]) => row(cell(worker),
        cell(score.toPrecision(4), true), ...terms.map((name) => cell(ms(cost[name] * 1e3), true))))));
  };
  const over = one.passed_over.map(([id, seconds, why]) => `${id.split("~")[0]} (${ms(seconds * 1e3)} left: ${why})`);
  return [make("p", {}, `Policy ${one.policy}, ${one.kind}; ${one.waiting} others waited` +
      `${over.length ? `; passed over: ${over.join(", ")}` : ""}${one.fetch ? `; prefix fetched from ${one.fetch}` : ""}.`),
    make("div", { class: "row" }, options("prefill"), options("decode"))];
}

// ---- orders ----

function drawOrders() {
  $("actions").tBodies[0].replaceChildren(...actions.slice(-KEPT).reverse().map((one) =>
    row(cell(new Date(one.at * 1e3).toLocaleTimeString()), cell(one.what), cell(one.about), cell(one.why ?? ""))));
}

// ---- events ----

const heard = {
  cluster: drawCluster,
  decision: (one) => {
    decisions.set(one.number, one);
    while (decisions.size > 4 * KEPT) decisions.delete(decisions.keys().next().value);
    drawRequests();
  },
  action: (one) => { actions.push(one); drawOrders(); },
};

function dispatch(block) {
  const fields = Object.fromEntries(block.split("\n").map((line) => {
    const colon = line.indexOf(": ");
    return [line.slice(0, colon), line.slice(colon + 2)];
  }));
  if (fields.data && heard[fields.event]) heard[fields.event](JSON.parse(fields.data));
}

async function listen() {
  const answer = await fetch("admin/v1/events", { headers: headers() });
  $("login").hidden = answer.status !== 401;
  if (!answer.ok) {
    $("refusal").textContent = (await answer.json()).error.message;
    throw new Error(answer.statusText);
  }
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const blocks = (rest + value).split("\n\n");
    rest = blocks.pop();
    blocks.forEach(dispatch);
  }
}

async function stay() {
  for (;;) {
    try { await listen(); } catch (error) { console.warn(error.message); }
    $("state").textContent = "Control is away";
    $("state").className = "pill away";
    await new Promise((resolve) => setTimeout(resolve, 2000));
  }
}

$("login").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem("diptych-key", $("key").value);
});
function show(view) {
  for (const button of document.querySelectorAll("nav button")) {
    button.setAttribute("aria-pressed", String(button.dataset.view === view));
    $(button.dataset.view).hidden = button.dataset.view !== view;
  }
  window.scrollTo(0, 0); // a browser jumps to the section, past the header
}
document.querySelectorAll("nav button").forEach((button) =>
  button.addEventListener("click", () => { location.hash = button.dataset.view; }));
window.addEventListener("hashchange", () => show(location.hash.slice(1) || "cluster"));
show(location.hash.slice(1) || "cluster");
stay();
