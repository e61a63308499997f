"""From a resolved run to a job: script, forecast, submission; and what becomes of it: status, wait, stop, cancel."""
