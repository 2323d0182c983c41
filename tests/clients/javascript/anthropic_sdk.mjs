// Anthropic's JavaScript SDK: messages, streams, tools, the tool runner and thinking.
import assert from "node:assert/strict";
import Anthropic from "@anthropic-ai/sdk";
import { betaZodTool } from "@anthropic-ai/sdk/helpers/beta/zod";
import { zodOutputFormat } from "@anthropic-ai/sdk/helpers/zod";
import { z } from "zod";
import { apiKey, citySchema, feature, messages, model, runFeatures, url } from "./features.mjs";

const client = new Anthropic({ baseURL: url, apiKey, maxRetries: 0, timeout: 60_000 });
const tools = [{ name: "get_weather", description: "The weather", input_schema: citySchema }];
const asked = { model, max_tokens: 500, messages };

feature("chat", async () => {
  const answer = await client.messages.create(asked);
  assert.ok(answer.content[0].text);
  assert.equal(answer.stop_reason, "end_turn");
});

feature("stream", async () => {
  let pieces = 0;
  const stream = client.messages.stream(asked).on("text", () => (pieces += 1));
  assert.ok((await stream.finalMessage()).content[0].text);
  assert.ok(pieces > 5);
});

feature("usage", async () => {
  const final = await client.messages.stream(asked).finalMessage();
  assert.ok(final.usage.input_tokens > 5);
  assert.ok(final.usage.output_tokens > 5);
});

feature("tools", async () => {
  const answer = await client.messages.create({ ...asked, tools, tool_choice: { type: "any" } });
  const call = answer.content.find((block) => block.type === "tool_use");
  const result = { type: "tool_result", tool_use_id: call.id, content: "sunny" };
  const turns = [
    ...messages,
    { role: "assistant", content: [call] },
    { role: "user", content: [result] },
  ];
  assert.ok((await client.messages.create({ ...asked, messages: turns, tools })).content[0].text);
});

feature("tools streamed", async () => {
  const stream = client.messages.stream({ ...asked, tools, tool_choice: { type: "tool", name: "get_weather" } });
  const call = (await stream.finalMessage()).content.find((block) => block.type === "tool_use");
  assert.ok(["Rome", "Oslo"].includes(call.input.city));
});

feature("tool runner", async () => {
  const weather = betaZodTool({
    name: "get_weather",
    description: "The weather",
    inputSchema: z.object({ city: z.string() }),
    run: () => "sunny",
  });
  assert.ok((await client.beta.messages.toolRunner({ ...asked, tools: [weather] })).content.length);
});

feature("structured", async () => {
  const format = zodOutputFormat(z.object({ city: z.enum(["Rome", "Oslo"]) }));
  const answer = await client.messages.parse({ ...asked, output_config: { format } });
  assert.ok(["Rome", "Oslo"].includes(answer.parsed_output.city));
});

feature("thinking", async () => {
  const thinking = { type: "enabled", budget_tokens: 1024 };
  const answer = await client.messages.create({ ...asked, max_tokens: 2048, thinking });
  assert.ok(answer.content.at(-1).text);
});

feature("cache control", async () => {
  const system = [{ type: "text", text: "Be brief.", cache_control: { type: "ephemeral" } }];
  assert.ok((await client.messages.create({ ...asked, system, metadata: { user_id: "u" } })).content[0].text);
});

feature("count tokens", async () => {
  assert.ok((await client.messages.countTokens({ model, messages })).input_tokens > 5);
});

feature("errors", async () => {
  await assert.rejects(client.messages.create({ ...asked, temperature: 7 }), Anthropic.BadRequestError);
});

await runFeatures();
