"""From stored records to tables for people and programs."""
