// Render markdown as HTML, the only place where text becomes HTML. HTML in a model's answer is shown as text.

import { highlight } from "./highlight.js";
import MarkdownIt from "./vendor/markdown-it/markdown-it.esm.min.mjs";

const markdown = new MarkdownIt({ html: false, linkify: true, breaks: true });
markdown.disable("image"); // a model's answer must not make the browser fetch anything

// Columns are aligned by class: the page allows no styles but those of its own sheets.
markdown.core.ruler.push("align", (state) => {
  for (const token of state.tokens) {
    const style = token.attrGet("style");
    if (style !== null) token.attrs = [["class", style.replace("text-align:", "align-")]];
  }
});

markdown.renderer.rules.link_open = (tokens, i, options, _, renderer) => {
  tokens[i].attrSet("target", "_blank");
  tokens[i].attrSet("rel", "noopener noreferrer");
  return renderer.renderToken(tokens, i, options);
};

const html = { createHTML: (text) => markdown.render(text) };
const policy = globalThis.trustedTypes?.createPolicy("markdown", html) ?? html;

export function render(element, text) {
  element.innerHTML = policy.createHTML(text);
  for (const code of element.querySelectorAll("pre > code")) highlight(code);
}
