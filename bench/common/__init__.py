"""What several suites share: systems that take turns, namespaces, congestion control, flags."""
