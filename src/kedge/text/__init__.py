"""Text: JSON for programs, and formatted values for people."""
