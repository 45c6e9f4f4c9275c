"""Tests of the page in Chromium. They are a package, so that one browser is open for all of them, and no longer."""
