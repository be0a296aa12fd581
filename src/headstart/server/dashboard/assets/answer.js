// One answer: requested, read as it streams, and shown as markdown or as tokens coloured by their origin.

import { call, events } from "./api.js";
import { render } from "./markdown.js";
import { count, find, make, MIN_TRIES, number, percent, seconds, sum } from "./page.js";

const ORIGINS = {
  draft: "accepted draft",
  copy: "accepted copy from the context",
  correction: "correction of a rejected draft",
  bonus: "bonus token",
  plain: "decoded without drafts",
};
const RENDER_INTERVAL = 80; // milliseconds between two renderings of growing markdown, at least
const RENDER_SHARE = 10; // at most a tenth of the time is spent rendering: long texts are rendered less often

export class Answer {
  constructor() {
    this.content = "";
    this.stats = null;
    this.usage = null;
    this.asked = this.begun = null; // when, in milliseconds
    this.origins = { draft: 0, copy: 0, correction: 0, bonus: 0, plain: 0 };
    this.thought = new Passage();
    this.reply = new Passage();
    this.last = this.reply; // where the last token went
    this.summary = make("summary", {}, "Thinking …");
    this.thinking = make("details", { class: "thinking", hidden: true }, this.summary, this.thought.element);
    this.legend = make("p", { class: "legend" });
    this.numbers = make("p", { class: "stats" });
    this.trouble = make("p", { role: "alert", class: "bad", hidden: true });
    this.element = make("div", { class: "answer" }, this.thinking, this.reply.element, this.trouble, this.legend, this.numbers);
  }

  /** An answer from an earlier visit: its text is all that was kept. */
  static of(text) {
    const answer = new Answer();
    answer.content = text;
    answer.reply.text(text);
    answer.reply.settle();
    return answer;
  }

  /** Send the request and read to the end. Errors are shown here; returns whether there was none. */
  async ask(body, signal) {
    this.asked = performance.now();
    this.element.setAttribute("aria-busy", "true");
    try {
      const streamed = { ...body, stream: true, stream_options: { include_usage: true }, include_origins: true, return_progress: true };
      const response = await call("/v1/chat/completions", { method: "POST", body: streamed, signal });
      for await (const chunk of events(response)) {
        if (chunk.prompt_progress) this.#progress(chunk.prompt_progress);
        if (chunk.generation_stats) this.#end(chunk);
        for (const choice of chunk.choices) this.#add(choice);
      }
      return true;
    } catch (error) {
      this.trouble.hidden = false;
      this.trouble.textContent = error.name === "AbortError" ? "Stopped." : error.message;
      return false;
    } finally {
      this.element.removeAttribute("aria-busy");
      this.thought.settle();
      this.reply.settle();
      this.#showThoughtLength();
      this.#count();
    }
  }

  #add({ delta, origins = [], finish_reason }) {
    if (origins.length) this.begun ??= performance.now();
    if (finish_reason) this.finish = finish_reason;
    if (delta.reasoning_content) this.last = this.thought;
    else if (delta.content) this.last = this.reply;
    this.thinking.hidden &&= this.last !== this.thought;
    const text = delta.reasoning_content || delta.content || "";
    // The tokens before the last one added nothing of their own. Text without a token was held back by one before.
    for (const origin of origins) {
      this.origins[origin] += 1;
      this.last.token(origin);
    }
    if (text) this.last.text(text);
    this.content = this.reply.written;
    if (origins.length) this.#count();
  }

  #progress({ processed, total }) {
    const reading = processed < total ? `Reading the prompt: ${number(processed)} of ${number(total)} tokens` : "";
    follow(() => (this.numbers.textContent = reading));
  }

  #end({ usage, generation_stats }) {
    this.usage = usage;
    this.stats = generation_stats;
    const spans = statements(this).map((statement) => make("span", {}, statement));
    follow(() => this.numbers.replaceChildren(...spans));
  }

  #showThoughtLength() {
    const tokens = this.usage?.completion_tokens_details.reasoning_tokens;
    this.summary.textContent = tokens ? `Thought, ${count(tokens, "token")}` : "Thought";
  }

  #count() {
    const kinds = Object.entries(this.origins).filter(([, tokens]) => tokens > 0);
    this.legend.replaceChildren(
      ...kinds.map(([origin, tokens]) =>
        make("span", {}, make("i", { class: `token ${origin}` }, ORIGINS[origin]), ` ${number(tokens)}`),
      ),
    );
  }
}

/** Change the answer, and keep the end of the chat in sight where it was. */
export function follow(change) {
  const thread = find("thread");
  const following = thread.scrollHeight - thread.scrollTop - thread.clientHeight < 80;
  change();
  if (following) thread.scrollTop = thread.scrollHeight;
}

/** A text that grows: as markdown, and token by token. The style sheet shows one of the two. */
class Passage {
  constructor() {
    this.written = "";
    this.shown = make("div", { class: "markdown" });
    this.tokens = make("div", { class: "tokens" });
    this.element = make("div", { class: "passage" }, this.shown, this.tokens);
    this.timer = null;
    this.cost = 0; // milliseconds that the last rendering took
  }

  token(origin) {
    this.tokens.append(make("span", { class: `token ${origin}`, title: ORIGINS[origin] }));
  }

  text(text) {
    this.written += text;
    (this.tokens.lastElementChild ?? this.tokens.appendChild(make("span", { class: "token" }))).append(text);
    this.timer ??= setTimeout(() => this.settle(), Math.max(RENDER_INTERVAL, this.cost * RENDER_SHARE));
  }

  /** Show all that was written. */
  settle() {
    clearTimeout(this.timer);
    this.timer = null;
    const began = performance.now();
    follow(() => render(this.shown, this.written));
    this.cost = performance.now() - began;
  }
}

/** An answer's stats, in a few words each. */
function statements({ stats, usage, asked, begun, finish }) {
  const rounds = Object.entries(stats.rounds_by_depth);
  const tried = (position) => sum(rounds.map(([depth, count]) => (Number(depth) >= position ? count : 0)));
  const by = stats.acceptance_by_position.filter((_, j) => tried(j + 1) >= MIN_TRIES).map(percent).join(" ");
  const shares = by && ` (${by})`;
  return [
    count(usage.completion_tokens, "token"),
    count(stats.rounds, "round"),
    `${number(stats.tokens_per_round, 2)} tokens per round`,
    stats.proposed_draft_tokens > 0 &&
      `accepted ${number(stats.accepted_draft_tokens)} of ${number(stats.proposed_draft_tokens)} drafts${shares}`,
    stats.paused_reason,
    stats.bypass_reason && `${stats.drafter_kind ? "no drafts of the head" : "no drafts"}: ${stats.bypass_reason}`,
    stats.num_draft_tokens_clamped_to && `depth limited to ${stats.num_draft_tokens_clamped_to}`,
    stats.rounds > 1 && `${number(stats.generation_tps, 1)} tokens/s`, // the first round is the prompt's
    begun && `first token ${seconds((begun - asked) / 1000)}`,
    stats.prefix_cache_hit && `${number(stats.prefix_cache_hit)} of ${number(usage.prompt_tokens)} prompt tokens from cache`,
    finish === "length" && "stopped at the token limit",
    stats.exact ? "exact" : "not exact on this device",
  ].filter(Boolean);
}
