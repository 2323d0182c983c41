"""Tools that tests share: suites and simulated parts that no product code needs."""
