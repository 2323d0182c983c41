// The last requests under another policy, split or load: POST /admin/v1/whatif.
import { $, cell, headers, make, ms, percent, row, table } from "./draw.js";

const RUNS = [["life", "In life", "life"], ["same", "Simulated as it is", "prefill"], ["other", "What if", "decode"]];
let offered = false;
let slo = { ttft_ms: 0 };

export async function offer(now) {
  slo = now.slo;
  if (offered) return;
  offered = true;
  const answer = await fetch("admin/v1/whatif", { headers: headers() });
  if (!answer.ok) { offered = false; return; }
  const { policies, policy } = await answer.json();
  $("policy").replaceChildren(...policies.map((name) => make("option", { value: name }, name)));
  $("policy").value = policy;
  for (const role of ["prefill", "decode"]) {
    const working = now.workers.filter((worker) => worker.role === role);
    $(`${role}-count`).value = Math.max(1, working.length);
  }
}

$("whatif-form").addEventListener("submit", async (event) => {
  event.preventDefault();
  const asked = { policy: $("policy").value, prefill: Number($("prefill-count").value),
    decode: Number($("decode-count").value), load: Number($("load").value) };
  $("whatif-refusal").textContent = "running";
  const answer = await fetch("admin/v1/whatif", { method: "POST", headers: headers(), body: JSON.stringify(asked) });
  const told = await answer.json();
  $("whatif-refusal").textContent = answer.ok ? "" : told.error.message;
  if (answer.ok) show(told);
});

function show(told) {
  const at = (run, percentile) => ms(run.ttft_ms[percentile / 5]);
  $("whatif-note").textContent = `${told.requests} requests of ${told.span_s.toFixed(0)} s. `;
  table("whatif-runs", ["", "Policy", "Workers", "Load", "Met", "Refused", "TTFT p50", "p95", "ITL p50"],
    RUNS.map(([name, title, colour]) => {
      const run = told[name];
      return row(make("td", {}, make("span", { class: `key ${colour}` }), ` ${title}`), cell(run.policy ?? ""),
        cell(run.prefill ? `${run.prefill}P ${run.decode}D` : ""), cell(run.load ? `${run.load} x` : ""),
        cell(percent(run.met), true), cell(run.refused ?? "", true), cell(at(run, 50), true), cell(at(run, 95), true),
        cell(run.itl_ms === undefined ? "" : ms(run.itl_ms), true));
    }));
  curves(told);
}

function curves(told) {
  const [left, right, top, bottom] = [60, 680, 14, 200];
  const values = [slo.ttft_ms, ...RUNS.flatMap(([name]) => told[name].ttft_ms)].map((value) => Math.log10(Math.max(0.1, value)));
  const [least, most] = [Math.floor(Math.min(...values)), Math.ceil(Math.max(...values))];
  const y = (value) => bottom - (bottom - top) * (Math.log10(Math.max(0.1, value)) - least) / (most - least);
  const x = (percentile) => left + (right - left) * percentile / 100;
  const lines = RUNS.map(([name, title, colour]) => make("polyline", { class: `curve ${colour}`,
    points: told[name].ttft_ms.map((value, index) => `${x(index * 5)},${y(value)}`).join(" ") }, make("title", {}, title)));
  const powers = Array.from({ length: most - least + 1 }, (_, step) => 10 ** (least + step));
  const ticks = powers.flatMap((power) => [
    make("line", { x1: left, x2: right, y1: y(power), y2: y(power), stroke: "var(--line)" }),
    make("text", { x: left - 8, y: y(power) + 4, "text-anchor": "end" }, power < 1000 ? `${power} ms` : `${power / 1000} s`)]);
  ticks.push(...[0, 25, 50, 75, 95].map((part) =>
    make("text", { x: x(part), y: bottom + 18, "text-anchor": "middle" }, `p${part}`)));
  const target = make("line", { x1: left, x2: right, y1: y(slo.ttft_ms), y2: y(slo.ttft_ms), class: "target" });
  $("whatif-curves").replaceChildren(...ticks, target,
    make("text", { x: left + 6, y: y(slo.ttft_ms) - 5 }, "TTFT target"), ...lines);
}
