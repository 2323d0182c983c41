// OpenAI's JavaScript SDK: chat and the Responses API.
import assert from "node:assert/strict";
import OpenAI from "openai";
import { apiKey, citySchema, feature, messages, model, question, runFeatures, v1 } from "./features.mjs";

const client = new OpenAI({ baseURL: v1, apiKey, maxRetries: 0, timeout: 60_000 });
const tools = [{ type: "function", function: { name: "get_weather", parameters: citySchema } }];

feature("chat", async () => {
  const answer = await client.chat.completions.create({ model, messages });
  assert.ok(answer.choices[0].message.content);
});

feature("stream", async () => {
  let pieces = 0;
  for await (const chunk of await client.chat.completions.create({ model, messages, stream: true }))
    if (chunk.choices[0]?.delta.content) pieces += 1;
  assert.ok(pieces > 5);
});

feature("usage", async () => {
  const stream_options = { include_usage: true };
  let usage;
  for await (const chunk of await client.chat.completions.create({ model, messages, stream: true, stream_options }))
    usage = chunk.usage ?? usage;
  assert.ok(usage.completion_tokens > 5);
});

feature("tools", async () => {
  let called = 0;
  const runner = client.chat.completions.runTools({
    model,
    messages,
    tool_choice: { type: "function", function: { name: "get_weather" } },
    tools: [
      {
        type: "function",
        function: { name: "get_weather", parameters: citySchema, parse: JSON.parse, function: () => String(++called) },
      },
    ],
  });
  await runner.done();
  assert.ok(called > 0);
});

feature("tools streamed", async () => {
  const stream = client.chat.completions.stream({ model, messages, tools, tool_choice: "required" });
  const final = await stream.finalChatCompletion();
  assert.ok(JSON.parse(final.choices[0].message.tool_calls[0].function.arguments).city);
});

feature("structured", async () => {
  const response_format = { type: "json_schema", json_schema: { name: "city", schema: citySchema, strict: true } };
  const answer = await client.chat.completions.parse({ model, messages, response_format });
  assert.ok(["Rome", "Oslo"].includes(JSON.parse(answer.choices[0].message.content).city));
});

feature("logprobs", async () => {
  const answer = await client.chat.completions.create({ model, messages, max_tokens: 5, logprobs: true, top_logprobs: 2 });
  assert.equal(answer.choices[0].logprobs.content.length, 5);
});

feature("errors", async () => {
  await assert.rejects(client.chat.completions.create({ model, messages, temperature: 7 }), OpenAI.BadRequestError);
});

feature("unknown fields", async () => {
  const answer = await client.chat.completions.create({
    model,
    messages: [{ ...messages[0], my_field: 1 }],
    store: true,
    metadata: { a: "b" },
    reasoning_effort: "low",
    my_own_field: null,
  });
  assert.ok(answer.choices[0].message.content);
});

feature("responses", async () => {
  assert.ok((await client.responses.create({ model, input: question })).output_text);
});

feature("responses streamed", async () => {
  const final = await client.responses.stream({ model, input: question }).finalResponse();
  assert.ok(final.output_text);
});

feature("responses tools", async () => {
  const answer = await client.responses.create({
    model,
    input: question,
    tools: [{ type: "function", name: "get_weather", parameters: citySchema, strict: true }],
    tool_choice: "required",
  });
  const call = answer.output.find((item) => item.type === "function_call");
  const result = { type: "function_call_output", call_id: call.call_id, output: "sunny" };
  const input = [...messages, call, result];
  assert.ok((await client.responses.create({ model, input })).output_text);
});

feature("responses stored", async () => {
  const first = await client.responses.create({ model, input: question });
  const second = await client.responses.create({ model, input: "And decode?", previous_response_id: first.id });
  assert.equal(second.previous_response_id, first.id);
});

await runFeatures();
