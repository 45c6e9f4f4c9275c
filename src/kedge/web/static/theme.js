// Before the page is drawn: the chosen colors, so that nothing flashes.
(() => {
  try {
    const theme = localStorage.getItem("kedge-theme");
    if (theme === "light" || theme === "dark") document.documentElement.dataset.theme = theme;
  } catch {
    // Storage may be switched off; the system's choice is used.
  }
  document.documentElement.classList.add("js");
})();
