"""Runs a plan with torch on real devices and measures it (needs the extra ``runner``)."""
