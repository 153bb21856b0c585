// An agent on the Vercel AI SDK: a tool loop, or with AGENT_ANSWER=structured a typed answer.
//
// It reads its task, base URL and key from the environment. AGENT_API chooses the provider package:
// chat_completions (@ai-sdk/openai-compatible), responses (@ai-sdk/openai) or anthropic
// (@ai-sdk/anthropic). AGENT_STREAM=1 streams.
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, Output, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

const { env } = process;
const MAX_TURNS = 4;
const SYSTEM = "Call the calculator for the math. Then reply Answer: ...";

function model() {
  const openai = { baseURL: env.OPENAI_BASE_URL, apiKey: env.OPENAI_API_KEY };
  switch (env.AGENT_API ?? "chat_completions") {
    case "chat_completions":
      return createOpenAICompatible({ name: "sinew", supportsStructuredOutputs: true, ...openai })("policy");
    case "responses":
      return createOpenAI(openai).responses("policy");
    case "anthropic":
      return createAnthropic({ baseURL: `${env.ANTHROPIC_BASE_URL}/v1`, apiKey: env.ANTHROPIC_API_KEY })("policy");
    default:
      throw new Error(`AGENT_API is ${env.AGENT_API}: chat_completions, responses or anthropic`);
  }
}

// Arithmetic, and nothing else.
function calculate(expression) {
  if (!/^[\d\s+\-*/().%]{1,200}$/.test(expression)) return "Error: only numbers, + - * / % and parentheses";
  return String(Function(`return ${expression}`)());
}

const calculator = tool({
  description: "Evaluates arithmetic.",
  inputSchema: z.object({ expression: z.string() }),
  execute: async ({ expression }) => calculate(expression),
});

async function run(options) {
  if (env.AGENT_STREAM !== "1") return generateText(options);
  const result = streamText(options);
  await result.consumeStream();
  return { text: await result.text, output: options.output && (await result.output) };
}

const common = { model: model(), prompt: env.SINEW_TASK, maxRetries: 0 };
if (env.AGENT_ANSWER === "structured") {
  const output = Output.object({ schema: z.object({ answer: z.int() }) });
  console.log(JSON.stringify((await run({ ...common, output })).output));
} else {
  const tools = { calculator };
  const { text } = await run({ ...common, instructions: SYSTEM, tools, stopWhen: stepCountIs(MAX_TURNS) });
  console.log(text);
}
