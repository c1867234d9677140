// The chosen theme. This script runs before the page is drawn, so that it does not change its colours.

const theme = localStorage.getItem("holdfast-theme");
if (theme) document.documentElement.dataset.theme = theme;
