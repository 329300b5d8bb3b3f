"""The half of the transaction coordinator that carries out effects."""
