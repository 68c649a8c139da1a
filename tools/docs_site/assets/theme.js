// Before a page is drawn: that it has scripts, and the theme that the reader chose.
"use strict";
document.documentElement.className = "js";
try {
  const theme = localStorage.getItem("attnreg-theme");
  if (theme) document.documentElement.dataset.theme = theme;
} catch { /* a page from a disk may keep nothing */ }
