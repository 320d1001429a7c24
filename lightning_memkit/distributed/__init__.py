"""What several ranks do together so that one rank's failed step is all ranks' failed step; no Lightning here."""
