"""Who the workers are: addresses from settings, DNS or Kubernetes, as they come and go."""
