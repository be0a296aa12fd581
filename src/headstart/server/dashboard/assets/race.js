// The same prompt with speculation off and on. One after the other: side by side they would share the machine, and
// slow each other down. With one seed for both the text must be the same, whatever the temperature. The clocks start
// at the first token: the second finds the prompt in the prefix cache.

import { Answer } from "./answer.js";
import { make, number, seconds } from "./page.js";

/** Run both in `place`. Returns the text with speculation on, or null if it was stopped or failed. */
export async function race(place, body, depth, signal) {
  const seeded = { ...body, seed: Math.floor(Math.random() * 2 ** 31) };
  const [off, on] = [lane("Speculation off"), lane(depth === "auto" ? "Speculation on" : `Speculation on, depth ${depth}`)];
  const verdict = make("p", { class: "verdict", role: "status" });
  place.append(make("div", { class: "race" }, off.element, on.element), verdict);
  on.clock.textContent = "waiting";
  for (const [each, k] of [[off, 0], [on, depth]]) {
    if (!(await run(each, { ...seeded, num_draft_tokens: k }, signal))) return null;
  }
  verdict.textContent = judge(off.answer, on.answer);
  return on.answer.content;
}

function lane(title) {
  const answer = new Answer();
  const clock = make("span", { class: "clock", title: "Since the first token" });
  const heading = make("h2", {}, title, clock);
  return { answer, clock, element: make("section", { class: "lane", "aria-label": title }, heading, answer.element) };
}

async function run({ answer, clock }, body, signal) {
  const tick = () => {
    clock.textContent = answer.begun === null ? "prefill" : seconds((performance.now() - answer.begun) / 1000);
  };
  const timer = setInterval(tick, 100);
  const well = await answer.ask(body, signal);
  clearInterval(timer);
  tick();
  return well;
}

function judge(off, on) {
  if (on.stats.bypass_reason) return `No comparison, there were no drafts: ${on.stats.bypass_reason.replace(/\.$/, "")}.`;
  const same = off.content === on.content && off.thought.written === on.thought.written;
  const why = on.stats.exact ? "which is a bug: please report it" : "because kernels on this device are not exact";
  const text = same ? "Both texts are identical." : `The texts differ, ${why}.`;
  const speedup = on.stats.generation_tps / off.stats.generation_tps;
  const speed = speedup > 0 && Number.isFinite(speedup) ? `${number(speedup, 2)} × the tokens per second, ` : "";
  return `With speculation: ${speed}${number(on.stats.tokens_per_round, 2)} tokens per round instead of ${number(off.stats.tokens_per_round, 2)}. ${text}`;
}
