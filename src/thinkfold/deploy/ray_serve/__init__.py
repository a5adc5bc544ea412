"""A fleet on Ray Serve: an ingress with the server's APIs, and one deployment of replicas a tier."""
