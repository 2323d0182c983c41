// What each client script shares: where the server is, and features that are tried one after the other.
// Outcomes are printed as JSON lines for the runner; the exit code is 1 if a feature failed.

export const url = process.env.CLIENT_URL;
export const v1 = `${url}/v1`;
export const model = process.env.CLIENT_MODEL;
export const apiKey = "none";
export const question = "What is prefill?";
export const messages = [{ role: "user", content: question }];
export const citySchema = {
  type: "object",
  properties: { city: { type: "string", enum: ["Rome", "Oslo"] } },
  required: ["city"],
  additionalProperties: false,
};

const features = [];

/** Registers a feature; `check` may be asynchronous and fails by throwing. */
export function feature(name, check) {
  features.push([name, check]);
}

/** Tries all features and ends the process. */
export async function runFeatures() {
  const failed = [];
  for (const [name, check] of features) {
    let error = "";
    const timeout = new Promise((_, reject) =>
      setTimeout(() => reject(new Error("no end after 60 s")), 60_000).unref(),
    );
    try {
      await Promise.race([check(), timeout]);
    } catch (thrown) {
      console.error(thrown);
      error = `${thrown?.name}: ${thrown?.message}`.replaceAll(/\s+/g, " ").slice(0, 1000);
      failed.push(name);
    }
    console.log(JSON.stringify({ feature: name, passed: !error, error }));
  }
  if (failed.length) console.error(`failed: ${failed.join(", ")}`);
  process.exit(failed.length ? 1 : 0);
}
