"""From a record to report.md, report.html and issue.md."""
