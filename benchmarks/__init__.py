"""Networks, scripts on real data, and one script per question of speed."""
