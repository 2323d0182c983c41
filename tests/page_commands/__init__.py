"""Every command of the pages: found, and run as it stands (`python -m tests.page_commands.run`)."""
