// Vercel's AI SDK: over chat completions, the Responses API and Anthropic's messages.
import assert from "node:assert/strict";
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateObject, generateText, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";
import { apiKey, feature, model, question, runFeatures, v1 } from "./features.mjs";

const compatible = createOpenAICompatible({ name: "diptych", baseURL: v1, apiKey, includeUsage: true, supportsStructuredOutputs: true })(model);
const openai = createOpenAI({ baseURL: v1, apiKey });
const anthropic = createAnthropic({ baseURL: v1, apiKey })(model);
const schema = z.object({ city: z.enum(["Rome", "Oslo"]) });
const asked = { prompt: question, maxRetries: 0 };
const weather = tool({ description: "The weather", inputSchema: schema, execute: async () => "sunny" });

/** Forces a call in the first step, and lets the model answer in the next one. */
async function useTool(chosen) {
  const result = await generateText({
    ...asked,
    model: chosen,
    tools: { weather },
    stopWhen: stepCountIs(2),
    prepareStep: ({ stepNumber }) => ({ toolChoice: stepNumber === 0 ? "required" : "none" }),
  });
  assert.ok(result.steps[0].toolCalls.length > 0);
  assert.ok(result.text);
}

feature("chat", async () => {
  assert.ok((await generateText({ ...asked, model: compatible })).text);
  assert.ok((await generateText({ ...asked, model: openai.chat(model) })).text);
});

feature("stream", async () => {
  const result = streamText({ ...asked, model: compatible });
  let pieces = 0;
  for await (const _ of result.textStream) pieces += 1;
  assert.ok(pieces > 5);
});

feature("usage", async () => {
  const result = streamText({ ...asked, model: compatible });
  await result.consumeStream();
  assert.ok((await result.usage).outputTokens > 5);
});

feature("tools", () => useTool(compatible));

feature("structured", async () => {
  const { object } = await generateObject({ ...asked, model: compatible, schema });
  assert.ok(["Rome", "Oslo"].includes(object.city));
});

feature("errors", async () => {
  await assert.rejects(generateText({ ...asked, model: compatible, temperature: 7 }), /temperature/);
});

feature("responses", async () => {
  assert.ok((await generateText({ ...asked, model: openai.responses(model) })).text);
});

feature("responses tools", () => useTool(openai.responses(model)));

feature("messages", async () => {
  assert.ok((await generateText({ ...asked, model: anthropic })).text);
});

feature("messages tools", () => useTool(anthropic));

await runFeatures();
