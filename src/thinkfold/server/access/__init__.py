"""Who may call what, and how much: API keys, quotas, the gate in front of every route."""
