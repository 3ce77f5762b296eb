"""Alignments: named settings and op replacements that put two engines on one arithmetic."""
