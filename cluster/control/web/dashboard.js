// The live page: reads /admin/v1/events (server-sent events over fetch, so that a key can go along).
import { $, cell, headers, make, ms, percent, row, table } from "./draw.js";
import { drawFleet } from "./fleet.js";
import { remember } from "./history.js";
import { timeline } from "./timeline.js";
import { offer } from "./whatif.js";

const KEPT = 60;
const decisions = new Map();
const actions = [];
let before = null;
let remembered_ms = -Infinity;
const HISTORY_MS = 10000;
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
  $("dial-note").textContent = `${goodput.requests} requests, ttft <= ${now.slo.ttft ?? `${now.slo.ttft_ms} ms`}, itl <= ${now.slo.itl_ms} ms`;
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
  drawFleet(now.workers, before?.workers ?? []);
  if (performance.now() - remembered_ms > HISTORY_MS) {
    remembered_ms = performance.now();
    remember(now.slo);
  }
  offer(now);
  before = now;
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
  const focused = document.activeElement?.dataset?.number; // new rows must not take the keyboard's place away
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
    shown.dataset.number = one.number;
    shown.setAttribute("aria-expanded", String(opened === one.number));
    if (opened === one.number) shown.className = "open";
    const open = () => { opened = opened === one.number ? null : one.number; drawRequests(); };
    shown.addEventListener("click", open);
    shown.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" && event.key !== " ") return;
      event.preventDefault(); // a space would scroll the page
      open();
    });
    if (opened !== one.number) return [shown];
    return [shown, make("tr", { class: "open" }, make("td", { colspan: 8, id: "explain" }, ...explained(one)))];
  }));
  if (focused) $("decisions").querySelector(`tr[data-number="${focused}"]`)?.focus({ preventScroll: true });
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
  const width = Math.max(280, Math.min(900, $("requests").clientWidth - 40));
  return [timeline(one, width), make("p", {}, `Policy ${one.policy}, ${one.kind}; ${one.waiting} others waited` +
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
const views = [...document.querySelectorAll("nav button")];
views.forEach((button, index) => {
  button.addEventListener("click", () => { location.hash = button.dataset.view; });
  button.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (step) views.at((index + step) % views.length).focus();
  });
});
window.addEventListener("hashchange", () => show(location.hash.slice(1) || "cluster"));
show(location.hash.slice(1) || "cluster");
stay();
