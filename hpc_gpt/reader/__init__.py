"""What logs say, and how it is shown: anyone's logs to runs, tables, the page."""
