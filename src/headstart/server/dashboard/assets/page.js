// Helpers for every part of the page. Text is only ever inserted as text.

export const find = (id) => document.getElementById(id);

/** An element. Children are elements or text. */
export function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== false && value !== undefined) element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children);
  return element;
}

/** A number with `digits` digits after the point, or a dash if it is not a number. */
export function number(value, digits = 0) {
  if (value === null || !Number.isFinite(value)) return "–";
  return value.toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits });
}

export const MIN_TRIES = 10; // drafts at a position before the share of accepted ones is shown: fewer say nothing

/** A count with its noun. */
export const count = (many, noun) => `${number(many)} ${noun}${many === 1 ? "" : "s"}`;

export const sum = (numbers) => numbers.reduce((a, b) => a + (b ?? 0), 0);

export const percent = (share) => (Number.isFinite(share) && share !== null ? `${Math.round(share * 100)}%` : "–");

export function bytes(count) {
  return count < 1e9 ? `${number(count / 1e6, count < 1e7 ? 1 : 0)} MB` : `${number(count / 1e9, 1)} GB`;
}

export function seconds(value) {
  if (value === null || !Number.isFinite(value)) return "–";
  return value < 1 ? `${Math.round(value * 1000)} ms` : `${number(value, value < 10 ? 2 : 1)} s`;
}

/** A colour of the style sheet in the form that a canvas accepts. */
export function colour(name) {
  probe.style.color = `var(--${name})`;
  return getComputedStyle(probe).color;
}

const probe = document.body.appendChild(make("span", { class: "probe", hidden: true }));

/** How far the served model drafts, with its head or with a drafter beside it. */
export function drafting({ native_mtp: head, drafter }) {
  return { ...head, available: head.available || drafter !== null, max_k: Math.max(head.max_k, drafter?.max_k ?? 0) };
}
