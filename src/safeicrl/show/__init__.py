"""What a person looks at: the demo and its films."""
