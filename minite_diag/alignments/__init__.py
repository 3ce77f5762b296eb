"""Named settings and op replacements that put an engine on a chosen arithmetic."""
