"""What people read: tables of a plan, reasons of a choice, progress."""
