// Colours for code: comments, strings, numbers and keywords. No parser, so that a dozen languages take a few lines.

const WORDS = new Set(
  ("and as assert async await bool break case catch class const continue def default del do double elif else enum except " +
    "export extends extern false final finally float fn for from func function global go if impl import in int interface " +
    "is lambda let long loop match mod mut new nil None not null or package pass private pub public raise return self " +
    "static str string struct super switch this throw trait true True False try type typeof undefined union unsafe use " +
    "var void where while with yield echo then fi done esac local select insert update delete create table").split(" "),
);
const HASH = /^(py|python|sh|bash|shell|zsh|ruby|rb|perl|r|yaml|yml|toml|ini|make|makefile|dockerfile)$/;
const STRINGS = String.raw`"""[^]*?(?:"""|$)|'''[^]*?(?:'''|$)|"(?:\\.|[^"\\\n])*"?|'(?:\\.|[^'\\\n])*'?|` + "`(?:\\\\.|[^`\\\\])*`?";
const REST = String.raw`\b\d[\w.]*|[A-Za-z_$][\w$]*`;

const pattern = (comments) => new RegExp(`(?<comment>${comments})|(?<string>${STRINGS})|${REST}`, "g");
const PATTERNS = { hash: pattern("#[^\\n]*"), slash: pattern(String.raw`\/\/[^\n]*|\/\*[^]*?(?:\*\/|$)|--[^\n]*`) };

/** Colour the code of an element whose class names a language. Its text stays as it is. */
export function highlight(code) {
  const language = /\blanguage-([\w+-]+)/.exec(code.className)?.[1].toLowerCase();
  if (!language || /^(text|txt|plain|html|xml|svg|markdown|md)$/.test(language)) return;
  const text = code.textContent;
  const parts = [];
  let end = 0;
  for (const found of text.matchAll(HASH.test(language) ? PATTERNS.hash : PATTERNS.slash)) {
    const kind = kindOf(found);
    if (kind === null) continue;
    const span = document.createElement("span");
    span.className = kind;
    span.textContent = found[0];
    parts.push(text.slice(end, found.index), span);
    end = found.index + found[0].length;
  }
  code.replaceChildren(...parts, text.slice(end));
}

function kindOf({ 0: text, groups }) {
  if (groups.comment !== undefined) return "comment";
  if (groups.string !== undefined) return "string";
  if (/^\d/.test(text)) return "number";
  return WORDS.has(text) ? "keyword" : null;
}
