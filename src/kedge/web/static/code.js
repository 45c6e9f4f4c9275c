// Code blocks: a button that copies each block, and syntax highlighting of blocks that name a language. The library
// is loaded with the first block.

const MAX_LENGTH = 20_000; // the browser would be busy for too long

export async function completeCode() {
  for (const block of document.querySelectorAll(".prose :not(.code) > pre, .prose > pre")) addButton(block);
  const all = [...document.querySelectorAll('.prose code[class^="language-"]:not([data-highlighted])')];
  const blocks = all.filter((block) => block.textContent.length <= MAX_LENGTH);
  if (!blocks.length) return;
  const { default: library } = await import("./highlight.js");
  for (const block of blocks) {
    if (library.getLanguage(block.className.slice("language-".length))) library.highlightElement(block);
  }
}

function addButton(block) {
  const frame = document.createElement("div");
  frame.className = "code";
  const button = document.createElement("button");
  button.type = "button";
  button.className = "quiet";
  button.dataset.do = "copy";
  button.textContent = "Copy code";
  block.replaceWith(frame);
  block.tabIndex = 0; // it may scroll
  frame.append(block, button);
}
