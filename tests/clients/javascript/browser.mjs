// A page of another origin, as browsers see it: the preflight request, and the headers that let the page read an answer.
import assert from "node:assert/strict";
import { feature, messages, model, runFeatures, url } from "./features.mjs";

const origin = "http://ui.example";
const paths = ["/v1/chat/completions", "/v1/messages", "/v1/responses"];

feature("preflight", async () => {
  for (const path of paths) {
    const answer = await fetch(url + path, {
      method: "OPTIONS",
      headers: {
        Origin: origin,
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization,content-type",
      },
    });
    assert.ok(answer.ok, `${path}: ${answer.status}`);
    assert.ok(["*", origin].includes(answer.headers.get("access-control-allow-origin")), path);
  }
});

feature("chat", async () => {
  const answer = await fetch(`${url}/v1/chat/completions`, {
    method: "POST",
    headers: { Origin: origin, "Content-Type": "application/json" },
    body: JSON.stringify({ model, messages }),
  });
  assert.ok(answer.ok);
  assert.ok(["*", origin].includes(answer.headers.get("access-control-allow-origin")), "no header for other origins");
});

await runFeatures();
