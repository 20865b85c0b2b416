"""All of Ray that knows no role: placement, local nodes, leases, adoption, stored arrays."""
