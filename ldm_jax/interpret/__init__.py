"""What a trained depth mixer has learned: contributions, gates, forgetting, conditioning."""
