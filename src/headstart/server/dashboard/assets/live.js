// Current numbers, and charts of up to an hour. The page keeps the samples that it has taken.

import { bars, overTime } from "./chart.js";
import { bytes, find, make, MIN_TRIES, number, percent, seconds, sum } from "./page.js";

const HOUR = 3600;
const NOW = 10; // seconds that count as now
const CALM = 60; // a line shows means of this part of the range
const INTERVAL = 2; // seconds between two samples: see main.js
const GAP = 5; // samples that may be missing before a line is broken

// The columns of the charts: what was counted since the previous sample, and what was at the time of each.
const COUNTS = ["generation_tokens", "rounds", "prompt_tokens", "cached_tokens", "first_tokens", "first_token_seconds"];
const BY_POSITION = ["proposed_by_position", "accepted_by_position"];
const SOURCES = ["head", "copy"]; // of accepted drafts; a block drafter's count as the head's
const LEVELS = ["running", "prefilling", "queued", "active_bytes", "cache_bytes", "prefix_bytes"];
const NAMES = ["time", "seconds", ...COUNTS, ...BY_POSITION, ...SOURCES, ...LEVELS];

let last = null; // the newest sample: its counts are totals
const samples = Object.fromEntries(NAMES.map((name) => [name, []]));
let charts = null;

/** Add a sample: the statistics of the model and of its prefix cache, as the server reports them now. */
export function update(stats, cache) {
  const { head, drafter, copy } = stats.accepted_by_source;
  const sample = { ...stats, head: head + drafter, copy, prefix_bytes: cache.bytes ?? 0, time: Date.now() / 1000 };
  if (last !== null) add(sample);
  last = sample;
  const old = samples.time.findIndex((time) => time > last.time - HOUR);
  for (const column of Object.values(samples)) column.splice(0, old);
  draw();
}

/** Forget all samples: the page shows another model. */
export function reset() {
  last = null;
  for (const column of Object.values(samples)) column.length = 0;
}

function add(sample) {
  if (sample.time - last.time > GAP * INTERVAL) addGap(last.time + INTERVAL);
  const before = sample.rounds < last.rounds ? {} : last; // a server that was restarted counts anew
  samples.time.push(sample.time);
  samples.seconds.push(sample.time - last.time);
  for (const name of [...COUNTS, ...SOURCES]) samples[name].push(sample[name] - (before[name] ?? 0));
  for (const name of BY_POSITION) samples[name].push(sample[name].map((count, j) => count - (before[name]?.[j] ?? 0)));
  for (const name of LEVELS) samples[name].push(sample[name]);
}

/** Add an empty sample, at which lines break. */
function addGap(time) {
  for (const [name, column] of Object.entries(samples)) column.push(name === "time" ? time : null);
}

export function show() {
  if (charts === null) {
    charts = makeCharts();
    for (const input of document.getElementsByName("range")) input.addEventListener("change", draw);
  }
  draw();
}

/** Draw the charts again in the colours of the new theme. */
export function retheme() {
  if (charts === null) return;
  for (const chart of Object.values(charts)) chart.destroy();
  find("charts").replaceChildren();
  charts = makeCharts();
  draw();
}

function makeCharts() {
  const exact = (value) => number(value, 2);
  const whole = (value) => number(value, Number.isInteger(value) ? 0 : 1);
  return {
    speed: overTime("speed", "Tokens per second", "all sequences together", [["tokens/s", "accent", (v) => number(v, 1)]]),
    yield: overTime("yield", "Tokens per round", "1 and the accepted drafts: of the head or drafter, and copies",
      [["all", "accent", exact], ["head", "blue", exact], ["copies", "amber", exact]], { atLeast: 2, write: whole }),
    acceptance: bars("acceptance", "Acceptance by position", "share of the drafts proposed at each position",
      { write: percent }),
    depth: overTime("depth-chart", "Depth", "drafts per round, on average", [["depth", "accent", exact]],
      { atLeast: 2, write: whole }),
    gains: bars("gains", "Expected speed by depth", "relative to no drafts; highlighted: the last round",
      { write: (gain) => number(gain, 2) }),
    sequences: overTime("sequences", "Sequences and queue", "decoding, in prefill, and waiting for admission",
      [["decoding", "accent", whole], ["prefill", "blue", whole], ["waiting", "amber", whole]], { write: whole }),
    first: overTime("first", "Time to first token", "from arrival, queueing included", [["first token", "accent", seconds]],
      { atLeast: 0.01, write: seconds }),
    prefix: overTime("prefix-chart", "Prefix-cache hits", "share of prompt tokens found in the cache",
      [["found", "accent", percent]], { write: percent }),
    memory: overTime("memory", "Memory", "as MLX counts it",
      [["in use", "accent", bytes], ["prefix cache", "blue", bytes], ["allocator cache", "muted", bytes]],
      { atLeast: 1e6, write: bytes }),
  };
}

function draw() {
  if (charts === null || last === null || find("live").hidden) return;
  const range = Number(document.querySelector("input[name=range]:checked").value);
  const to = last.time;
  const begin = Math.max(samples.time.findIndex((time) => time > to - range), 0);
  const s = Object.fromEntries(Object.entries(samples).map(([name, column]) => [name, column.slice(begin)]));
  const wide = Math.max(1, Math.round(range / CALM / INTERVAL));
  const ratio = (a, b) => moving(s[a], s[b], wide);
  const over = (chart, ...columns) => chart.draw([s.time, ...columns], to - range, to);

  over(charts.speed, ratio("generation_tokens", "seconds"));
  over(charts.yield, ...["generation_tokens", ...SOURCES].map((name) => ratio(name, "rounds")));
  over(charts.depth, moving(s.proposed_by_position.map((row) => row && sum(row)), s.rounds, wide));
  over(charts.sequences, s.running, s.prefilling, s.queued);
  over(charts.first, ratio("first_token_seconds", "first_tokens"));
  over(charts.prefix, ratio("cached_tokens", "prompt_tokens"));
  over(charts.memory, s.active_bytes, s.prefix_bytes, s.cache_bytes);

  const proposed = byPosition(s.proposed_by_position);
  const accepted = byPosition(s.accepted_by_position);
  const tried = proposed.filter((count) => count >= MIN_TRIES); // there are never more at a later position
  charts.acceptance.draw(tried.map((_, j) => j + 1), tried.map((count, j) => (accepted[j] ?? 0) / count));
  const speeds = last.expected_speed_by_depth;
  charts.gains.draw(speeds.map((_, k) => k), speeds, (k) => k === last.depth);
  tiles(s, sum(proposed), sum(accepted));
}

function tiles(s, proposed, accepted) {
  const now = Math.max(s.time.findIndex((time) => time > last.time - NOW), 0);
  const latest = (name) => s[name].at(-1) ?? 0;
  const total = (name) => sum(s[name]);
  const speed = sum(s.generation_tokens.slice(now)) / sum(s.seconds.slice(now));
  const prompts = total("prompt_tokens");
  const shown = document.querySelector("input[name=range]:checked").parentElement.textContent.trim();
  const facts = [
    ["Tokens/s", number(speed, 1), `last ${NOW} s`],
    ["Tokens/round", number(total("generation_tokens") / total("rounds"), 2), shown],
    ["Accepted", percent(accepted / proposed), shown],
    ["Depth", number(proposed / total("rounds"), 1), shown],
    ["First token", seconds(total("first_token_seconds") / total("first_tokens")), shown],
    ["Sequences", number(latest("running") + latest("prefilling")), `${number(latest("queued"))} waiting`],
    ["Prefix hits", prompts ? percent(total("cached_tokens") / prompts) : "–", shown],
    ["Memory", bytes(latest("active_bytes")), "in use"],
  ];
  const tile = ([label, value, note]) => make("div", {}, make("dt", {}, label), make("dd", {}, value, make("small", {}, note)));
  find("tiles").replaceChildren(...facts.map(tile));
}

/** The ratio of two columns over the last `wide` samples at each; null where there is nothing to divide by. */
function moving(above, below, wide) {
  return above.map((_, i) => {
    if (below[i] === null) return null;
    const part = (column) => sum(column.slice(Math.max(0, i - wide + 1), i + 1));
    return part(below) ? part(above) / part(below) : null;
  });
}

/** The sums by position of rows of counts. */
function byPosition(rows) {
  const totals = [];
  for (const row of rows) row?.forEach((count, j) => (totals[j] = (totals[j] ?? 0) + count));
  return totals;
}
