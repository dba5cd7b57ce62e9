"""Loading of batches from prepared datasets; each batch is a pure function of its step."""
