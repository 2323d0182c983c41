// LangChain.js: ChatOpenAI over chat completions and the Responses API, and ChatAnthropic.
import assert from "node:assert/strict";
import { ChatAnthropic } from "@langchain/anthropic";
import { HumanMessage, ToolMessage } from "@langchain/core/messages";
import { tool } from "@langchain/core/tools";
import { ChatOpenAI } from "@langchain/openai";
import { z } from "zod";
import { apiKey, feature, model, question, runFeatures, url, v1 } from "./features.mjs";

const settings = { model, apiKey, maxRetries: 0, timeout: 60_000 };
const chat = new ChatOpenAI({ ...settings, configuration: { baseURL: v1 } });
const responses = new ChatOpenAI({ ...settings, configuration: { baseURL: v1 }, useResponsesApi: true });
const anthropic = new ChatAnthropic({ model, apiKey, maxRetries: 0, anthropicApiUrl: url });
const schema = z.object({ city: z.enum(["Rome", "Oslo"]) });
const weather = tool(() => "sunny", { name: "weather", description: "The weather", schema });

/** Forces a call, hands its result back, and expects a text. Over the Responses API LangChain sends no "any". */
async function useTool(chosen, tool_choice = "any") {
  const asked = await chosen.bindTools([weather], { tool_choice }).invoke(question);
  assert.ok(asked.tool_calls.length > 0);
  const results = asked.tool_calls.map((call) => new ToolMessage({ content: "sunny", tool_call_id: call.id }));
  const final = await chosen.bindTools([weather]).invoke([new HumanMessage(question), asked, ...results]);
  assert.ok(final.content);
}

feature("chat", async () => assert.ok((await chat.invoke(question)).content));

feature("stream", async () => {
  let pieces = 0;
  for await (const piece of await chat.stream(question)) if (piece.content) pieces += 1;
  assert.ok(pieces > 5);
});

feature("usage", async () => {
  let total;
  for await (const piece of await chat.stream(question)) total = total ? total.concat(piece) : piece;
  assert.ok(total.usage_metadata.output_tokens > 5);
});

feature("tools", () => useTool(chat));

feature("structured", async () => {
  for (const method of ["jsonSchema", "functionCalling"]) {
    const filled = await chat.withStructuredOutput(schema, { method, name: "city" }).invoke(question);
    assert.ok(["Rome", "Oslo"].includes(filled.city));
  }
});

feature("responses", async () => assert.ok((await responses.invoke(question)).content));

feature("responses tools", () => useTool(responses, "weather"));

feature("messages", async () => assert.ok((await anthropic.invoke(question)).content));

feature("messages tools", () => useTool(anthropic));

await runFeatures();
